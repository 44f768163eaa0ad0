"""The fields by which an endpoint is asked: OpenAI's names, and vLLM's where OpenAI has none.

vLLM's are those of its `ChatCompletionRequest` and `CompletionRequest` (0.12 and later).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from etude.core.call import ChatRequest, Constraint, Sampling
from etude.core.message import Message
from etude.wire.client import Refused

_SEED_SHIFT = 32
"""Keys have 63 bits; some servers take only 31 for a seed."""

_PLAIN = ("top_k", "min_p", "min_tokens", "stop_token_ids", "repetition_penalty")
_PENALTIES = ("frequency_penalty", "presence_penalty")

VLLM_FIELDS = frozenset({*_PLAIN, "structured_outputs", "chat_template_kwargs", "prompt_logprobs"})
"""Fields that vLLM added to OpenAI's."""

USUAL_FIELDS = frozenset({"messages", "prompt", "temperature", "top_p", "seed", "max_tokens", "stop"})
"""Fields that every endpoint takes, for every model."""


def request_fields(
    request: ChatRequest, more: Collection[str] = (), thinking: str | None = "reasoning_content"
) -> dict[str, Any]:
    """The request's own fields of a chat completions body; of a completions body where it has a prompt.

    `more` are those of `VLLM_FIELDS` that the endpoint takes; `thinking` is its name for what a model
    thought, in messages that are sent back to it; without one it is not sent. Raises Refused for what is
    asked for in a field that the endpoint does not take.
    """
    sampling = request.sampling
    asked: dict[str, Any] = (
        {"messages": [_sent(message, thinking) for message in request.messages]}
        if request.prompt is None
        else {"prompt": request.prompt}
    )
    fields = asked | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request.key >> _SEED_SHIFT if sampling.seed is None else sampling.seed,
    }
    if sampling.max_tokens is not None:
        fields["max_tokens"] = sampling.max_tokens
    if sampling.stop:
        fields["stop"] = sampling.stop
    fields |= sampling_fields(sampling)
    if sampling.constraint is not None and sampling.constraint.kind in ("json_object", "json_schema"):
        fields["response_format"] = _response_format(sampling.constraint)
        del fields["structured_outputs"]
    if request.prompt_logprobs is not None:
        fields["prompt_logprobs"] = request.prompt_logprobs
    if request.tools:
        fields |= {"tools": request.tools, **_tool_fields(request)}
    options = dict(request.template_options)
    if "reasoning_effort" in options:
        fields["reasoning_effort"] = options.pop("reasoning_effort")
    if options:
        fields["chat_template_kwargs"] = options
    if refused := sorted((VLLM_FIELDS - set(more)) & fields.keys()):
        raise Refused(
            f"the endpoint is not known to take {', '.join(refused)}, which the call asks for; leave it out, "
            "or, where it does, say `provider: vllm`",
            impossible=True,
            param=refused[0],
        )
    return fields


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The parameters beyond temperature, top_p and length that are not at their defaults, in vLLM's words."""
    changed = sampling.changed()
    fields = {name: changed[name] for name in (*_PENALTIES, *_PLAIN) if name in changed}
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.constraint is not None:
        fields["structured_outputs"] = _structured(sampling.constraint)
    return fields


def _structured(constraint: Constraint) -> dict[str, Any]:
    match constraint.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": json.loads(constraint.text)}
        case "choice":
            return {"choice": json.loads(constraint.text)}
    return {constraint.kind: constraint.text}


def _response_format(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind == "json_object":
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": json.loads(constraint.text), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _tool_fields(request: ChatRequest) -> dict[str, Any]:
    """How tools may be called, where that is not as always."""
    kind, _, name = request.tool_choice.partition(":")
    fields: dict[str, Any] = {} if request.parallel_tool_calls else {"parallel_tool_calls": False}
    if kind == "auto":
        return fields
    return fields | {"tool_choice": {"type": "function", "function": {"name": name}} if name else kind}


def _sent(message: Message, thinking: str | None) -> Message:
    if "reasoning_content" not in message or thinking == "reasoning_content":
        return message
    sent = {name: value for name, value in message.items() if name != "reasoning_content"}
    return sent if thinking is None else sent | {thinking: message["reasoning_content"]}
