"""A model's answer, as an agent uses it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from etude.core.call import Call
from etude.core.message import Message
from etude.store.plain import plain


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model wants to be called."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    """The arguments by name; None when the model did not write a JSON object."""
    raw_arguments: str
    """The arguments exactly as the model wrote them."""

    def result(self, content: Any) -> Message:
        """The tool message that gives `content` back to the model; what is not text is written as JSON."""
        text = content if isinstance(content, str) else json.dumps(plain(content), ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "content": text}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of a model."""

    text: str
    """The content of the message; empty when there is none."""
    message: Message
    """The message in OpenAI's format: append it to the conversation to go on."""
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    logprobs: tuple[float, ...] | None
    """Natural-log probability of each sampled token, where the engine tells."""
    token_ids: tuple[int, ...] | None
    """The sampled token ids, where the engine tells."""


def reply_of(call: Call) -> Reply:
    """The answer of a finished call. The message is a copy: the record stays what it is."""
    completion = call.completion
    assert completion is not None, "the call has no answer"
    message = plain(completion.message)
    content = message.get("content")
    return Reply(
        text=content if isinstance(content, str) else "",
        message=message,
        tool_calls=tuple(_tool_call(wire) for wire in message.get("tool_calls") or ()),
        finish_reason=completion.finish_reason,
        logprobs=completion.logprobs,
        token_ids=completion.completion_ids,
    )


def _tool_call(wire: Any) -> ToolCall:
    raw = wire["function"]["arguments"]
    try:
        arguments = json.loads(raw)
    except ValueError:
        arguments = None
    return ToolCall(
        id=wire.get("id", ""),
        name=wire["function"]["name"],
        arguments=arguments if isinstance(arguments, dict) else None,
        raw_arguments=raw,
    )
