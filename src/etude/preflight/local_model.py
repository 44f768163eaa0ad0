"""The check of a local model from its config and tokenizer, without loading its weights."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from etude.backends.capabilities import LocalAdapterConfig
from etude.config.document import strings
from etude.core.call import ChatRequest
from etude.core.episode import Example
from etude.core.errors import EngineError, EtudeError, RequestError
from etude.core.message import Message
from etude.engines.local import LocalLlmConfig
from etude.learner.memory import ModelNumbers, fits
from etude.models.device import choose_device, choose_dtype
from etude.models.family import probed_turn
from etude.models.lora import require_four_bits
from etude.models.memory import available_memory, shown_bytes
from etude.models.policy import LoraOptions, Policy
from etude.models.probe import PROBES, QUESTION, TOOL
from etude.models.source import is_gguf
from etude.models.template import ChatTemplate
from etude.models.text_codec import load_tokenizer
from etude.models.weights import load_outline, loading
from etude.preflight.finding import Findings

_SAMPLE = 64


def check_local_model(
    what: str,
    llm: LocalLlmConfig,
    base: str,
    adapter: LocalAdapterConfig | None,
    examples: Sequence[Example],
    findings: Findings,
) -> float:
    """Check a model's chat template, LoRA setting, memory and context. Return the tokens of an example.

    They are the median over one user message each, or 0 if there is no text. `base` is the folder or name of
    the weights, and `adapter` trains them. Raises RequestError if the model cannot be used.
    """
    device = choose_device(llm.device)
    if llm.quantization is not None:
        require_four_bits(device)
        if adapter is not None and adapter.lora is None:
            raise RequestError(
                f"`quantization: {llm.quantization}` trains LoRA weights only: set 'lora' in the trainer "
                "adapter"
            )
    policy = outline(base)
    parameters = sum(value.numel() for value in policy.model.parameters())
    dtype = choose_dtype(llm.dtype, device, parameters)
    if adapter is not None and adapter.lora is not None:
        policy.use_lora(LoraOptions(**adapter.lora.model_dump()), seed=0)
    trainable = sum(value.numel() for value in policy.trainable().values()) if adapter is not None else 0
    prompts = _prompt_lengths(policy, examples, llm.chat_template_kwargs)
    trained = f", {trainable / 1e6:.3g} M trained" if trainable and trainable != parameters else ""
    findings.ok(
        what,
        f"{llm.model or 'tiny'}: {parameters / 1e6:.3g} M parameters{trained}, {device.type}, "
        f"{str(dtype).removeprefix('torch.')}, context {policy.max_context}",
    )
    if is_gguf(base):
        ends = ", ".join(policy.tokenizer.convert_ids_to_tokens(sorted(policy.stop_ids)))
        findings.ok(what, f"unpacked from GGUF, with the chat template in the file; a turn ends at {ends}")
    _check_template(what, policy, llm.chat_template_kwargs, findings)
    _check_context(what, llm, policy, prompts, findings)
    _check_memory(what, llm, policy, parameters, device, dtype, max(prompts, default=0), adapter, findings)
    if device.type == "cpu" and parameters > 1_000_000_000:
        findings.warn(what, "more than a billion parameters on a CPU: expect hours for each epoch")
    return statistics.median(prompts) if prompts else 0.0


def outline(source: str) -> Policy:
    """Load a model without its weights. Weight files on this machine are checked against its config.

    Raises RequestError if there is none, it cannot chat, or its weights do not match its config.
    """
    from transformers import GenerationConfig

    with loading(source) as (location, file, config):
        tokenizer = load_tokenizer(location, file)
        model = load_outline(config, location, **file)
    # Most models have one. The others name their end of turn elsewhere.
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(location)
    return Policy(model, tokenizer, source, torch.device("meta"))


def _check_template(what: str, policy: Policy, options: Mapping[str, Any], findings: Findings) -> None:
    """Check that the template knows its options, shows tools, and extends conversations token for token."""
    question = {"role": "user", "content": "Two?"}
    turns = [question, {"role": "assistant", "content": "2"}]
    try:
        policy.template.prompt(ChatRequest((question,), template_options=options))
        policy.template.transcript([*turns, *turns])
    except RequestError:
        findings.warn(
            what,
            "its chat template rewrites earlier turns: each call of a conversation is trained on as its "
            "own sequence",
        )
    except EtudeError as error:
        findings.fail(what, error)
        return
    plain, shown = policy.template.prompt(ChatRequest((question,))).ids, False
    with contextlib.suppress(EtudeError):
        shown = policy.template.prompt(ChatRequest((question,), tools=(TOOL,))).ids != plain
    if not shown:
        findings.warn(
            what, "its chat template does not show tools to the model; an agent with tools needs that"
        )
    elif unread := unread_values(policy.template):
        findings.warn(
            what,
            f"tool calls as its chat template writes them are not understood where their arguments have "
            f"{', '.join(unread)}: they stay in the answer's text, or come back changed",
        )


def _prompt_lengths(policy: Policy, examples: Sequence[Example], options: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each example as one user message, without the agent's own prompt."""
    step = max(1, len(examples) // _SAMPLE)
    inputs = [dict(example.inputs) for example in examples[::step][:_SAMPLE]]
    texts = ["\n".join(text for _, text in strings(own)) for own in inputs]
    asked = [({"role": "user", "content": text},) for text in texts if text]
    requests = [ChatRequest(messages, template_options=options) for messages in asked]
    try:
        return [len(policy.template.prompt(request).ids) for request in requests]
    except EtudeError:
        return []  # The finding about the template says why.


def _check_context(
    what: str, llm: LocalLlmConfig, policy: Policy, prompts: Sequence[int], findings: Findings
) -> None:
    longest = max(prompts, default=0)
    if longest >= policy.max_context:
        findings.fail(
            what, f"an example alone takes {longest} tokens, and the model's context is {policy.max_context}"
        )
    elif longest + llm.max_tokens > policy.max_context:
        findings.warn(
            what,
            f"max_tokens {llm.max_tokens} and the longest example ({longest} tokens) are more than the "
            f"context of {policy.max_context}: answers may be cut",
        )


def _check_memory(
    what: str,
    llm: LocalLlmConfig,
    policy: Policy,
    parameters: int,
    device: torch.device,
    dtype: torch.dtype,
    longest: int,
    adapter: LocalAdapterConfig | None,
    findings: Findings,
) -> None:
    """Check that the weights fit in memory, with training on one sequence or the smaller `token_budget`."""
    needed = int(parameters * (dtype.itemsize if llm.quantization is None else 0.5))
    free = available_memory(device.type)
    use = "needs"
    if adapter is not None:
        numbers = replace(ModelNumbers.of(policy), weights=needed, size=dtype.itemsize)
        budget = adapter.token_budget or numbers.token_budget(on_gpu=device.type == "cuda")
        tokens = min(budget, longest + llm.max_tokens, policy.max_context)
        training = numbers.training(
            tokens,
            tokens,
            on_gpu=device.type == "cuda",
            checkpointed=adapter.gradient_checkpointing is not False,
            reference=True,
        )
        use, needed = f"training it on {tokens} tokens at a time takes", training.total
    if free is not None and not fits(needed, free):
        findings.warn(
            what,
            f"{use} about {shown_bytes(needed)} of memory, and {shown_bytes(free)} are free; train with "
            "`lora` or `gradient_checkpointing`, lower token_budget, or choose a smaller model",
        )


_STRING = {"type": "string"}
VALUES: Mapping[str, tuple[tuple[Mapping[str, Any], Any], ...]] = {
    "booleans": (({"type": "boolean"}, True), ({"type": ["boolean", "null"]}, False)),
    "null": (
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ({"anyOf": [_STRING, {"type": "null"}]}, None),
    ),
    "numbers": (
        ({"type": "integer"}, -5),
        ({"type": "number"}, 1e-7),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, 2.5),
    ),
    "texts that look like other values": tuple(
        (_STRING, text) for text in ("True", "null", "123", "[1, 2]", '{"a": 1}', "")
    ),
    "choices": (({"enum": ["a", "b"]}, "a"), ({"enum": [1, 2, None]}, 2), ({"const": "1"}, "1")),
    "several lines": ((_STRING, "  if a:\n\n    b\n"),),
    "marks and other scripts": ((_STRING, 'It\'s "a" <b> & \\new\\ {c}, [d]'), (_STRING, "é 中文 😀")),
    "lists": (
        ({"type": "array", "items": {"type": "boolean"}}, [True, False]),
        ({"type": "array"}, [None, 1.5, "True", []]),
    ),
    "objects": (
        ({"$ref": "#/$defs/Place"}, {"city": "Rome", "at": {"x": None, "y": [1, "2"]}, "is_far": True}),
        ({"type": "object"}, {}),
    ),
    "no arguments": (),
}
"""Values of arguments with their JSON schemas, by kind."""


def unread_values(template: ChatTemplate) -> list[str]:
    """Return the kinds of values that change when the template writes a tool call and parses it.

    Tries one call and two, with and without a thought before, if the template can write them.
    """
    written = template.family().written
    if "a call" not in written:
        return []
    shapes = [("", 1), ("", 2)] if "two calls" in written else [("", 1)]
    asked = template.rendering.text([QUESTION], [TOOL], {}, ask=True)
    turn = probed_turn(template.rendering, PROBES["thinking and a call"], {})
    if "thinking and a call" in written and turn is not None and turn[0] == asked:
        shapes += [("A thought.", calls) for _, calls in shapes]

    def comes_back(kinds: Iterable[str]) -> bool:
        return all(_round_trips(template, kinds, thought, calls) for thought, calls in shapes)

    if comes_back(VALUES) and comes_back(["no arguments"]):
        return []
    return [kind for kind in VALUES if not comes_back([kind])]


def _round_trips(template: ChatTemplate, kinds: Iterable[str], thought: str, calls: int) -> bool:
    """Return whether calls with all values of some kinds parse to the same calls."""
    values = [value for kind in kinds for value in VALUES[kind]]
    arguments = {f"value_{number}": value for number, (_, value) in enumerate(values)}
    # Some templates refuse tools and arguments without a description.
    properties = {
        f"value_{number}": {"description": "A value.", **schema} for number, (schema, _) in enumerate(values)
    }
    place = {"type": "object", "properties": {"city": _STRING, "is_far": {"type": "boolean"}}}
    parameters = {"type": "object", "properties": properties, "required": [], "$defs": {"Place": place}}
    tool = {"name": "probed_values", "description": "A probe.", "parameters": parameters}
    request = ChatRequest((QUESTION,), ({"type": "function", "function": tool},))
    function = {"name": "probed_values", "arguments": json.dumps(arguments)}
    made = [{"id": f"probe{number:04d}", "type": "function", "function": function} for number in range(calls)]
    answer: Message = {"role": "assistant", "content": "", "tool_calls": made}
    if thought:
        answer["reasoning_content"] = thought
    try:
        prompt, ids = template.prompt(request).ids, template.written_ids(request, answer)
    except EngineError:
        return False
    read = template.parse(template.decode(ids[:-1]), request.tools, ids=ids, prompt_ids=prompt)
    found = [json.loads(call["function"]["arguments"]) for call in read.get("tool_calls") or ()]
    is_same = json.dumps(found, sort_keys=True) == json.dumps([arguments] * calls, sort_keys=True)
    return is_same and read.get("reasoning_content", "") == thought
