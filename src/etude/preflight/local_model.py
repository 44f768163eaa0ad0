"""The check of a local model from its config and tokenizer, without loading its weights."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.core.call import ChatRequest
from etude.core.errors import EtudeError, RequestError
from etude.engines.local import LocalLlmConfig
from etude.models.device import available_memory, choose_device, choose_dtype, shown_bytes
from etude.models.policy import Policy
from etude.models.rendering import TOOL
from etude.models.source import is_gguf
from etude.models.text_codec import load_generation_config, load_tokenizer
from etude.models.weights import load_outline, loading
from etude.preflight.finding import Findings


def check_local_model(
    what: str, llm: LocalLlmConfig, base: str, adapter: LocalAdapterConfig | None, findings: Findings
) -> None:
    """Check a model's chat template, LoRA setting and memory. `base` is the folder or name of the weights,
    and `adapter` trains them. Raises RequestError if the model cannot be used."""
    device = choose_device(llm.device)
    policy = outline(base)
    parameters = sum(value.numel() for value in policy.model.parameters())
    dtype = choose_dtype(llm.dtype, device, parameters)
    if adapter is not None and adapter.lora is not None:
        policy.use_lora(adapter.lora, seed=0)
    trainable = sum(value.numel() for value in policy.trainable().values()) if adapter is not None else 0
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
    needed, free, use = parameters * dtype.itemsize, available_memory(device.type), "needs"
    if adapter is not None:
        # Gradients and two moments in float32, and masters of weights in half precision.
        has_masters = dtype.itemsize < 4 and not policy.is_lora
        use, needed = "and its training need", needed + trainable * (16 if has_masters else 12)
    if free is not None and needed > free:
        findings.warn(
            what,
            f"{use} at least {shown_bytes(needed)} of memory, and {shown_bytes(free)} are free; train with "
            "`lora`, or choose a smaller model",
        )
    if device.type == "cpu" and parameters > 1_000_000_000:
        findings.warn(what, "more than a billion parameters on a CPU: expect hours for each epoch")


def outline(source: str) -> Policy:
    """Load a model without its weights. Raises RequestError if it cannot chat, or they do not fit it."""
    with loading(source) as (location, file, config):
        tokenizer = load_tokenizer(location, file)
        model = load_outline(config, location, **file)
        if (generation := load_generation_config(location)) is not None:
            model.generation_config = generation
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
    if len(plain) >= policy.max_context:
        fault = f"its context is {policy.max_context} tokens, and a prompt of one word takes {len(plain)}"
        findings.fail(what, f"{fault}, so no answer fits; correct its config, or choose another model")
    with contextlib.suppress(EtudeError):
        shown = policy.template.prompt(ChatRequest((question,), tools=(TOOL,))).ids != plain
    if not shown:
        findings.warn(
            what, "its chat template does not show tools to the model; an agent with tools needs that"
        )
