"""Tiny policies of stock families with random weights, and foreign chat templates: for tests only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

from etude.core.call import PLAIN_SAMPLING, Call, ChatRequest, Completion
from etude.models.device import limit_threads
from etude.models.policy import Policy
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

TEXTS = [f"what is {left} plus {right}? it is {left + right}." for left in range(9) for right in range(9)]

CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
}

CHATML = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen2.5 writes it: the end of a turn is followed by a line break, and tool results are the user's."""

FORGETFUL = CHATML.replace(
    "{{ message.content }}{%- for call",
    "{% if '</think>' in message.content and not loop.last %}"
    "{{ message.content.split('</think>')[-1].lstrip() }}{% else %}{{ message.content }}{% endif %}"
    "{%- for call",
)
"""As Qwen3: what was thought in earlier turns is left out of the prompt."""

assert FORGETFUL != CHATML

SEALED = CHATML + "{%- if not add_generation_prompt %}{{ eos_token }}{% endif %}"
"""As Phi-3: the end of the whole conversation has a token of its own."""


@functools.cache
def tokenizer(template: str | None = None) -> Any:
    """A byte-level tokenizer; with `template`, ChatML's: its end of turn is not its lowest stop id."""
    made = build_tokenizer(TEXTS, vocab_size=330)
    if template is not None:
        made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        made.chat_template = template
    return made


@functools.cache
def policy(seed: int = 0, max_context: int = 512) -> Policy:
    """A tiny Llama for tests that only read it."""
    return fresh_policy(seed, max_context=max_context)


def fresh_policy(seed: int = 0, max_context: int = 512) -> Policy:
    """A tiny Llama whose distributions are not flat."""
    shape = TinyShape(hidden_size=32, layers=2, heads=4, intermediate_size=48, max_context=max_context)
    return loud(build_policy(tokenizer(), seed, shape))


def chatml_policy(template: str = CHATML) -> Policy:
    """A tiny Llama that talks ChatML, and may stop at two tokens, as Qwen's do."""
    words = tokenizer(template)
    made = fresh_policy()
    made.model.resize_token_embeddings(len(words))
    stops = [words.eos_token_id, words.convert_tokens_to_ids("<|im_end|>")]
    made.model.generation_config.eos_token_id = stops
    return Policy(made.model, words, "chatml", made.device)


def loud(made: Policy) -> Policy:
    """Weights large enough that a token in the wrong place shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
    return made


def tiny_sizes() -> dict[str, Any]:
    """Keys that the configs of most families have."""
    words = tokenizer()
    return {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "bos_token_id": None,
    }


def family(name: str, **changes: Any) -> Policy:
    """A tiny model of a family in transformers, by the name of its config class."""
    limit_threads()
    words = tokenizer()
    config = getattr(transformers, name)(**(tiny_sizes() | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return loud(Policy(model, words, name, torch.device("cpu")))


def true_logprobs(of: Policy, prompt: Any, sampled: Any, temperature: float = 1.0) -> list[float]:
    """Logprobs of sampled tokens by one plain forward pass of the model."""
    ids = torch.tensor([[*prompt, *sampled]])
    with torch.no_grad():
        logits = of.model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(sampled)[:, None]).squeeze(1).tolist()


def make_call(request: ChatRequest, completion: Completion, index: int = 0) -> Call:
    """The call that a request and its completion make."""
    return Call(index, "<workflow>", "policy", request, completion)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def continuing(ids, sampling=PLAIN_SAMPLING, key=0, conversation="", **more):
    """A request to go on from token ids."""
    return ChatRequest((), (), sampling, key, conversation, prompt=ids, **more)


def change_weights(of: Policy, change: Callable[[torch.Tensor], object], name: str = "") -> None:
    """Change in place the tensors that are trained and whose names contain `name`."""
    with torch.no_grad():
        for found, tensor in of.trainable().items():
            if name in found:
                change(tensor)
