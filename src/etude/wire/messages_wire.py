"""Anthropic's messages: answers out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from etude.wire.dialect import Event, RecordedCompletion
from etude.wire.said import arguments_object

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {"server_error": "api_error", "conflict_error": "invalid_request_error"}


def message_object(recorded: RecordedCompletion) -> dict[str, Any]:
    """The `message` object."""
    completion = recorded.completion
    message = completion.message
    blocks: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        blocks.append({"type": "text", "text": message.get("content") or "", "citations": None})
    for call in calls:
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": arguments_object(function["arguments"]),
            }
        )
    return {
        "id": f"msg_{recorded.id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": recorded.model,
        "content": blocks,
        "stop_reason": _STOP_REASONS.get(completion.finish_reason, "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": completion.usage.prompt_tokens,
            "output_tokens": completion.usage.completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def message_events(message: dict[str, Any]) -> Iterator[Event]:
    """The events of a stream of the message."""
    usage = message["usage"]
    begun = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield _event("message_start", message=begun)
    for place, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=place, content_block=empty)
        yield _event("content_block_delta", index=place, delta=delta)
        yield _event("content_block_stop", index=place)
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
    yield _event("message_stop")


def error_object(message: str, *, kind: str, code: str | None) -> dict[str, Any]:
    """Anthropic's error object, of OpenAI's `kind` and `code`."""
    if code == "not_found":
        kind = "not_found_error"
    return {"type": "error", "error": {"type": _ERRORS.get(kind, kind), "message": message}}


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}
