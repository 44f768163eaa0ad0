"""Anthropic's messages, as agents speak it: requests in, answers out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from etude.core.errors import RequestError
from etude.core.message import Message, Tool
from etude.wire.dialect import (
    ChatBody,
    Dialect,
    Event,
    RecordedCompletion,
    arguments_object,
    arguments_text,
    as_object,
    objects_in,
    require_honoured,
    required_text,
    text_in,
    tool_call,
)

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

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class MessagesDialect(Dialect):
    """`POST /messages`, for agents that are written for Anthropic's client."""

    def parse(self, body: Any) -> ChatBody:
        """Read a request. Raises RequestError for blocks and tools too that a chat has no place for."""
        body = as_object(body)
        require_honoured(body, _FREE, _NEUTRAL)
        messages: list[Message] = []
        for index, message in enumerate(objects_in(body.get("messages"), "messages")):
            messages += _messages(message, f"messages[{index}]")
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
            messages=self._memory.restored([*first, *messages]),
            tools=tuple(_tool(tool) for tool in objects_in(body.get("tools"), "tools")),
            sampling=given,
            stream=bool(body.get("stream")),
        )

    def reply(self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int) -> dict[str, Any]:
        """The `message` object."""
        completion = recorded.completion
        message, usage = completion.message, completion.usage
        self._memory.add(message)
        calls = message.get("tool_calls") or ()
        blocks: list[dict[str, Any]] = []
        if message.get("content") or not calls:
            blocks.append({"type": "text", "text": message.get("content") or "", "citations": None})
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            block = {"type": "tool_use", "id": call["id"], "name": name, "input": arguments_object(arguments)}
            blocks.append(block)
        return {
            "id": f"msg_{recorded.id.removeprefix('chatcmpl-')}",
            "type": "message",
            "role": "assistant",
            "model": recorded.model,
            "content": blocks,
            "stop_reason": _STOP_REASONS.get(completion.finish_reason, "end_turn"),
            "stop_sequence": None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def events(self, reply: dict[str, Any], asked: ChatBody) -> Iterator[Event]:
        """The message, block by block."""
        usage = reply["usage"]
        begun = {**reply, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        yield _event("message_start", message=begun)
        for index, block in enumerate(reply["content"]):
            if block["type"] == "text":
                empty = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield _event("content_block_start", index=index, content_block=empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
        yield _event("message_stop")

    @staticmethod
    def error(status: int, message: str, code: str | None) -> dict[str, Any]:
        """Anthropic's error object."""
        kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}


def _messages(message: Mapping[str, Any], where: str) -> Iterator[Message]:
    """The chat messages that stand for one here: a user's has results of tools, each a message of its own."""
    role, content = required_text(message, "role", where), message.get("content")
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
            text = text_in(block.get("content") or "", f"{where}: tool_result", _TEXT)
            call = required_text(block, "tool_use_id", where)
            yield {"role": "tool", "tool_call_id": call, "content": text}
        rest = content if isinstance(content, str) else [block for block in blocks if block not in results]
        if rest or not results:
            yield {"role": role, "content": text_in(rest, where, _TEXT)}
    else:
        raise RequestError(f"a message's role must be user or assistant, found {role!r:.40}")


def _assistant(content: Any, where: str) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    blocks = [block for block in objects_in(content, where) if block.get("type") not in _FORGOTTEN]
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
    name, id = (required_text(block, field, where) for field in ("name", "id"))
    return tool_call(id, name, arguments_text(arguments))


def _tool(tool: Mapping[str, Any]) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"tools that the API runs are not supported for a recorded model, found {tool!r:.80}"
        )
    function = {"name": required_text(tool, "name", "a tool"), "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
