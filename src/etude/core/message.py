"""Chat messages in OpenAI's shape.

Inside the program a message is a plain dict in OpenAI's wire format (`Message`), because it is
passed on to engines and templates untouched. `OpenAIMessage` is its validated form, for values
that a person writes or reads.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from etude.core.data_model import DataModel
from etude.core.errors import RequestError
from etude.core.json_text import JsonError, read_json

Message: TypeAlias = dict[str, Any]
"""`{"role": …, "content": …}` and, where they apply, `tool_calls`, `tool_call_id` and `name`."""

Tool: TypeAlias = dict[str, Any]
"""A tool in OpenAI's format: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


class OpenAIMessage(DataModel, extra="allow"):
    """A chat message as OpenAI's API defines it. Nothing that came with it is dropped."""

    role: str
    content: str | None = None

    def to_wire(self) -> Message:
        """The message as the API takes it, without unset fields."""
        return self.model_dump(exclude_unset=True) | {"role": self.role, "content": self.content}


def text_of(message: Message) -> str:
    """The text of a message; of content in parts, the text parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def is_text(message: Message) -> bool:
    """Whether the content is nothing but text: a string, none at all, or parts of type `text`."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return all(isinstance(part, dict) and part.get("type", "text") == "text" for part in parts)


def arguments_of(function: Mapping[str, Any], *, unique_keys: bool = False) -> dict[str, Any]:
    """The arguments of a tool call, which are JSON text. Raises RequestError where they are no object.

    Without `unique_keys`, the last of equal keys counts.
    """
    text, problem = function.get("arguments"), "no JSON object"
    try:
        arguments = read_json(text, unique_keys=unique_keys) if isinstance(text, str) else text
    except JsonError as error:
        arguments, problem = None, f"broken JSON ({error.problem})"
    if not isinstance(arguments, dict):
        raise RequestError(
            f"the arguments of the call of {function.get('name')!r} are {problem}: {text!r:.80}"
        )
    return arguments


def _call_key(function: dict[str, Any]) -> dict[str, Any]:
    """A call without the spaces in its arguments: some client libraries write these anew."""
    try:
        return {**function, "arguments": read_json(function["arguments"], unique_keys=False)}
    except (KeyError, TypeError, ValueError):
        return function


def message_key(message: Message) -> str:
    """The same text for messages that count as the same: role, content and tool calls.

    Ids, empty fields and thinking are left out, because client libraries drop and renumber them.
    """
    calls = [_call_key(call.get("function", call)) for call in message.get("tool_calls") or ()]
    content = text_of(message) if is_text(message) else message["content"]
    return json.dumps([message.get("role"), content, calls], sort_keys=True, default=str)


def is_same(recorded: Message, sent: Message) -> bool:
    """Whether a client sent a recorded message again: with its thinking as it was, or without it."""
    thinking = sent.get("reasoning_content")
    return message_key(recorded) == message_key(sent) and thinking in (
        None,
        "",
        recorded.get("reasoning_content"),
    )
