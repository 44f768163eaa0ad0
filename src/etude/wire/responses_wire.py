"""OpenAI's Responses API: answers out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etude.wire.dialect import ChatBody, Event, RecordedCompletion
from etude.wire.openai_format import logprobs_to_wire


def response_id(recorded: RecordedCompletion) -> str:
    """The name of a response: as much a function of the request as the completion's."""
    return f"resp_{recorded.id.removeprefix('chatcmpl-')}"


def response_object(
    recorded: RecordedCompletion, asked: ChatBody, body: Mapping[str, Any], created: int
) -> dict[str, Any]:
    """The `response` object; `created` in Unix seconds."""
    completion = recorded.completion
    cut = completion.finish_reason == "length"
    return {
        "id": response_id(recorded),
        "object": "response",
        "created_at": created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": recorded.model,
        "output": _output(recorded, asked),
        "usage": _usage(recorded),
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "metadata": body.get("metadata") or {},
        "tools": body.get("tools") or [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "max_output_tokens": body.get("max_output_tokens"),
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": True,
    }


def response_events(response: dict[str, Any]) -> Iterator[Event]:
    """The events of a stream of the response, numbered in order."""
    ended = f"response.{response['status']}"
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for place, item in enumerate(response["output"]):
        events += [(name, {"output_index": place, **fields}) for name, fields in _item_events(item)]
    events.append((ended, {"response": response}))
    for number, (name, fields) in enumerate(events):
        yield name, {"type": name, "sequence_number": number, **fields}


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    is_message = item["type"] == "message"
    empty: dict[str, Any] = {"content": []} if is_message else {"arguments": ""}
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", **empty}}
    if is_message:
        yield from _text_events(item)
    else:
        name, arguments = "response.function_call_arguments", item["arguments"]
        yield f"{name}.delta", {"item_id": item["id"], "delta": arguments}
        yield f"{name}.done", {"item_id": item["id"], "name": item["name"], "arguments": arguments}
    yield "response.output_item.done", {"item": item}


def _text_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    (part,) = item["content"]
    text, logprobs = part["text"], part["logprobs"]
    at = {"item_id": item["id"], "content_index": 0}
    yield "response.content_part.added", {**at, "part": {**part, "text": "", "logprobs": []}}
    yield "response.output_text.delta", {**at, "delta": text, "logprobs": logprobs}
    yield "response.output_text.done", {**at, "text": text, "logprobs": logprobs}
    yield "response.content_part.done", {**at, "part": part}


def _output(recorded: RecordedCompletion, asked: ChatBody) -> list[dict[str, Any]]:
    completion, name = recorded.completion, response_id(recorded)
    calls = completion.message.get("tool_calls") or ()
    status = "incomplete" if completion.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    text = completion.message.get("content")
    if text or not calls:
        logprobs = logprobs_to_wire(completion) if asked.logprobs else None
        part = {
            "type": "output_text",
            "text": text or "",
            "annotations": [],
            "logprobs": [{**one, "bytes": []} for one in logprobs["content"]] if logprobs else [],
        }
        items.append(
            {
                "type": "message",
                "id": name.replace("resp_", "msg_", 1),
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for place, call in enumerate(calls):
        items.append(
            {
                "type": "function_call",
                "id": f"{name.replace('resp_', 'fc_', 1)}-{place}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return items


def _usage(recorded: RecordedCompletion) -> dict[str, Any]:
    usage = recorded.completion.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
