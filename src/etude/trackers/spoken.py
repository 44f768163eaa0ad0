"""Messages in the form of OpenTelemetry's GenAI conventions: a role, and parts of several types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etude.core.json_text import read_json


def messages_as_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as `[{"role": …, "parts": [{"type": "text", "content": …}, …]}, …]`."""
    return [{"role": message.get("role"), "parts": list(_parts(message))} for message in messages]


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    if message.get("role") == "tool":
        yield {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return
    if message.get("reasoning_content"):
        yield {"type": "reasoning", "content": message["reasoning_content"]}
    for part in [content] if isinstance(content, str) else content or ():
        if isinstance(part, str):
            yield {"type": "text", "content": part}
        elif part.get("type") == "text":
            yield {"type": "text", "content": part.get("text")}
        else:
            yield dict(part)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        yield {
            "type": "tool_call",
            "id": call.get("id"),
            "name": function.get("name"),
            "arguments": _parsed(arguments) if isinstance(arguments, str) else arguments,
        }


def _parsed(text: str) -> Any:
    try:
        return read_json(text, unique_keys=False)
    except ValueError:
        return text
