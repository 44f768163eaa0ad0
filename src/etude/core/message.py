"""Chat messages in OpenAI's format.

Inside the program a message is a plain dict in OpenAI's wire format (`Message`), because engines and
templates receive it untouched. `OpenAIMessage` is the validated form, for values that people write or read.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from etude.core.data_model import DataModel
from etude.core.errors import RequestError
from etude.core.json_text import JsonError, read_json

Message: TypeAlias = dict[str, Any]
"""`{"role": …, "content": …}` and, where they apply, `tool_calls`, `tool_call_id` and `name`."""

Tool: TypeAlias = dict[str, Any]
"""A tool in OpenAI's format: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


class OpenAIMessage(DataModel, extra="allow"):
    """A chat message as OpenAI's API defines it. Extra fields are kept."""

    role: str
    content: str | None = None

    def to_wire(self) -> Message:
        """Return the message as the API takes it, without unset fields."""
        return self.model_dump(exclude_unset=True) | {"role": self.role, "content": self.content}


def message_text(message: Message) -> str:
    """Return the text of a message; of a content in parts, the joined text parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def plain_text(message: Message) -> str:
    """Return the text of a message, or its tool calls as JSON if it has no text."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return message_text(message) or (json.dumps(calls, ensure_ascii=False) if calls else "")


def is_text(message: Message) -> bool:
    """Return whether the content is only text: a string, None, or parts of type `text`."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return all(isinstance(part, dict) and part.get("type", "text") == "text" for part in parts)


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a message's tool call, with `arguments` as JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_arguments(function: Mapping[str, Any], *, unique_keys: bool = False) -> dict[str, Any]:
    """Parse the arguments of a tool call from JSON; without `unique_keys`, the last of equal keys counts.
    Raises RequestError if they are not an object."""
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


def with_parsed_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's function with the value of its arguments. Arguments that are no JSON text stay as they
    are: some agents send the object itself."""
    arguments = function.get("arguments")
    with suppress(ValueError):
        arguments = read_json(arguments, unique_keys=False) if isinstance(arguments, str) else arguments
    return {**function, "arguments": arguments}


def message_key(message: Message) -> str:
    """Return a text that is equal for messages with the same role, content and tool calls, whatever their
    ids, empty fields and thinking, which client libraries drop and renumber, and the spaces in arguments."""
    calls = [with_parsed_arguments(call.get("function", call)) for call in message.get("tool_calls") or ()]
    content = message_text(message) if is_text(message) else message["content"]
    return json.dumps([message.get("role"), content, calls], sort_keys=True, default=str)


def thinking_key(message: Message) -> tuple[str, str]:
    """Return a key that is equal for messages with equal content and equal thinking."""
    return message_key(message), str(message.get("reasoning_content") or "")


def is_same(recorded: Message, sent: Message) -> bool:
    """Return whether a client sent a recorded message again, with its thinking unchanged or removed."""
    thinking = sent.get("reasoning_content")
    return message_key(recorded) == message_key(sent) and thinking in (
        None,
        "",
        recorded.get("reasoning_content"),
    )
