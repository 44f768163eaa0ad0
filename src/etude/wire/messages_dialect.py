"""Anthropic's messages: requests in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etude.core.errors import RequestError
from etude.core.message import Message, Tool
from etude.wire.dialect import (
    ChatBody,
    Event,
    RecordedCompletion,
    objects_in,
    require_honoured,
    require_object,
    required,
    text_in,
)
from etude.wire.messages_wire import error_object, message_events, message_object
from etude.wire.said import Said, arguments_text

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
}
"""Names of sampling parameters, and what they are called here."""

_READ_HERE = {"model", "messages", "system", "tools", "stream", *_SAMPLING}
_FREE = _READ_HERE | {"metadata", "service_tier", "cache_control"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
}
_TEXT = ("text",)
_FORGOTTEN = ("thinking", "redacted_thinking")
"""Blocks that the API itself leaves out of later prompts."""


class MessagesDialect:
    """`POST /messages`, for agents that are written for Anthropic's client."""

    def __init__(self, said: Said) -> None:
        self._said = said

    def parse(self, body: Any) -> ChatBody:
        """See Dialect. Raises RequestError for blocks and tools that a chat has no place for."""
        body = require_object(body)
        require_honoured(body, _FREE, _NEUTRAL)
        messages: list[Message] = []
        for place, message in enumerate(objects_in(body.get("messages"), "messages")):
            messages += _messages(message, f"messages[{place}]")
        if not messages:
            raise RequestError("messages must hold at least one message, found none")
        if messages[-1]["role"] == "assistant":
            raise RequestError(
                "a recorded model cannot go on in the middle of its answer; end with a user message"
            )
        system = body.get("system")
        first = [{"role": "system", "content": text_in(system, "system", _TEXT)}] if system else []
        given = {ours: body[name] for name, ours in _SAMPLING.items() if body.get(name) not in (None, [])}
        return ChatBody(
            model=str(body.get("model") or ""),
            messages=self._said.as_said([*first, *messages]),
            tools=tuple(_tool(tool) for tool in objects_in(body.get("tools"), "tools")),
            sampling=given,
            stream=bool(body.get("stream")),
        )

    def reply(self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int) -> dict[str, Any]:
        """See Dialect."""
        self._said.add(recorded.completion.message)
        return message_object(recorded)

    def events(
        self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int
    ) -> Iterator[Event]:
        """See Dialect."""
        return message_events(self.reply(recorded, asked, body, created))

    def error(self, message: str, *, kind: str, code: str | None) -> dict[str, Any]:
        """See Dialect."""
        return error_object(message, kind=kind, code=code)


def _messages(message: Mapping[str, Any], where: str) -> Iterator[Message]:
    """The chat messages of one: a user's has results of tools, each a message of its own."""
    role, content = required(message, "role", where), message.get("content")
    if content is None:
        raise RequestError(f"{where} has no content")
    where = f"{where}.content"
    if role == "assistant":
        yield _assistant(content, where)
    elif role in ("user", "system"):
        blocks = [] if isinstance(content, str) else objects_in(content, where)
        results = [block for block in blocks if block.get("type") == "tool_result"]
        for block in results:
            # The content may be left out, for a tool that returns nothing.
            said = text_in(block.get("content") or "", f"{where}: tool_result", _TEXT)
            yield {"role": "tool", "tool_call_id": required(block, "tool_use_id", where), "content": said}
        rest = content if isinstance(content, str) else [one for one in blocks if one not in results]
        if rest or not results:
            yield {"role": role, "content": text_in(rest, where, _TEXT)}
    else:
        raise RequestError(f"a message's role must be user or assistant, found {role!r:.40}")


def _assistant(content: Any, where: str) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    blocks = [one for one in objects_in(content, where) if one.get("type") not in _FORGOTTEN]
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    text = text_in([block for block in blocks if block not in uses], where, _TEXT)
    message: Message = {"role": "assistant", "content": text or (None if uses else "")}
    if uses:
        message["tool_calls"] = [_tool_call(block, where) for block in uses]
    return message


def _tool_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}: the input of a tool_use must be an object, found {arguments!r:.80}")
    function = {"name": required(block, "name", where), "arguments": arguments_text(arguments)}
    return {"id": required(block, "id", where), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any]) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"tools that the API runs are not supported for a recorded model, found {tool!r:.80}"
        )
    function = {"name": required(tool, "name", "a tool"), "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
