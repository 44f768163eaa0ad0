"""OpenAI's Responses API, as agents speak it: requests in, answers out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etude.core.errors import RequestError
from etude.core.message import Message, Tool
from etude.wire.chat import recorded_logprobs
from etude.wire.dialect import (
    BOOKKEEPING,
    ChatBody,
    Dialect,
    Event,
    RecordedCompletion,
    as_object,
    objects_in,
    require_honoured,
    required_text,
    text_in,
    tool_call,
)

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = {_LOGPROBS, "reasoning.encrypted_content"}
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""Names of sampling parameters, and what they are called here."""

_READ_HERE = {"model", "input", "instructions", "tools", "previous_response_id", "include", *_SAMPLING}
_PRESENTATION = {"stream", "stream_options", "top_logprobs"}
_FREE = _READ_HERE | _PRESENTATION | BOOKKEEPING | {"prompt_cache_retention", "prompt_cache_options"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "parallel_tool_calls": (True,),
    "reasoning": ({},),
    "text": ({"format": {"type": "text"}}, {}),
    "tool_choice": ("auto",),
    "truncation": ("disabled", "auto"),
}
_TEXT = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")


class ResponsesDialect(Dialect):
    """`POST /responses`. An answer can be gone on from with `previous_response_id`."""

    def parse(self, body: Any) -> ChatBody:
        """Read a request. Raises RequestError for items and tools too that a chat has no place for."""
        body = as_object(body)
        require_honoured(body, _FREE, _NEUTRAL)
        include = body.get("include") or []
        unknown = [name for name in include if name not in _INCLUDED]
        if unknown:
            raise RequestError(f"'include' of {unknown[0]!r} is not supported for a recorded model")
        messages = (
            *_instructions(body),
            *self._earlier(body.get("previous_response_id")),
            *self._memory.restored(_messages(body.get("input"))),
        )
        if not messages:
            raise RequestError("input must hold at least one message, found none")
        return ChatBody(
            model=str(body.get("model") or ""),
            messages=messages,
            tools=tuple(_tool(tool) for tool in objects_in(body.get("tools"), "tools")),
            sampling={ours: body[name] for name, ours in _SAMPLING.items() if body.get(name) is not None},
            stream=bool(body.get("stream")),
            logprobs=_LOGPROBS in include,
        )

    def reply(self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int) -> dict[str, Any]:
        """The `response` object, which is remembered by its name."""
        # As much a function of the request as the completion's.
        name, completion = f"resp_{recorded.id.removeprefix('chatcmpl-')}", recorded.completion
        self._memory.add(completion.message)
        # Instructions are of one request; the API does not carry them over.
        own = asked.messages[len(_instructions(body)) :]
        self._memory.conversations[name] = (*own, completion.message)
        cut, usage = completion.finish_reason == "length", completion.usage
        return {
            "id": name,
            "object": "response",
            "created_at": created,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": recorded.model,
            "output": list(_output(name, recorded, asked)),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            **{field: body.get(field) for field in ("instructions", "previous_response_id", *_SAMPLING)},
            "metadata": body.get("metadata") or {},
            "tools": body.get("tools") or [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "store": True,
        }

    def events(self, reply: dict[str, Any], asked: ChatBody) -> Iterator[Event]:
        """The response item by item, the events numbered in order."""
        begun = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for index, item in enumerate(reply["output"]):
            events += [(name, {"output_index": index, **fields}) for name, fields in _item_events(item)]
        events.append((f"response.{reply['status']}", {"response": reply}))
        for number, (name, fields) in enumerate(events):
            yield name, {"type": name, "sequence_number": number, **fields}

    def _earlier(self, name: Any) -> tuple[Message, ...]:
        if name is None:
            return ()
        if name not in self._memory.conversations:
            raise RequestError(f"previous_response_id {name!r:.80} is no response of this episode")
        return self._memory.conversations[name]


def _instructions(body: Mapping[str, Any]) -> tuple[Message, ...]:
    if not body.get("instructions"):
        return ()
    return ({"role": "system", "content": required_text(body, "instructions", "the request")},)


def _messages(value: Any) -> list[Message]:
    """The chat messages of the input: items of one turn of the assistant are one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[Message] = []
    is_open = False
    for index, item in enumerate(objects_in(value, "input")):
        where, kind = f"input[{index}]", item.get("type", "message")
        if kind == "reasoning":
            continue
        by_assistant = kind == "function_call" or (kind == "message" and item.get("role") == "assistant")
        if by_assistant:
            if not is_open:
                messages.append({"role": "assistant", "content": None})
            _add(messages[-1], item, where)
        elif kind == "function_call_output":
            output = text_in(item.get("output"), f"{where}.output", _TEXT)
            call = required_text(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call, "content": output})
        elif kind == "message":
            role = required_text(item, "role", where)
            if role not in _ROLES:
                raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}, found {role!r:.40}")
            messages.append(
                {"role": role, "content": text_in(item.get("content"), f"{where}.content", _TEXT)}
            )
        else:
            raise RequestError(f"{where}: items of type {kind!r:.40} are not supported for a recorded model")
        is_open = by_assistant
    return messages


def _add(message: Message, item: Mapping[str, Any], where: str) -> None:
    """Add an item of the assistant to its message."""
    if item.get("type") != "function_call":
        text = text_in(item.get("content"), f"{where}.content", _TEXT)
        message["content"] = (message["content"] or "") + text
        return
    name, arguments, id = (required_text(item, field, where) for field in ("name", "arguments", "call_id"))
    message.setdefault("tool_calls", []).append(tool_call(id, name, arguments))


def _tool(tool: Mapping[str, Any]) -> Tool:
    if tool.get("type") != "function":
        raise RequestError(
            f"only tools of type 'function' are supported for a recorded model, found {tool!r:.80}"
        )
    required_text(tool, "name", "a tool")
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}


def _output(name: str, recorded: RecordedCompletion, asked: ChatBody) -> Iterator[dict[str, Any]]:
    """The items of a response: its text, and a call of a tool each."""
    completion = recorded.completion
    text, calls = completion.message.get("content"), completion.message.get("tool_calls") or ()
    if text or not calls:
        logprobs = recorded_logprobs(completion) if asked.logprobs else None
        part = {
            "type": "output_text",
            "text": text or "",
            "annotations": [],
            "logprobs": [{**token, "bytes": []} for token in logprobs["content"]] if logprobs else [],
        }
        yield {
            "type": "message",
            "id": name.replace("resp_", "msg_", 1),
            "role": "assistant",
            "status": "incomplete" if completion.finish_reason == "length" else "completed",
            "content": [part],
        }
    for index, call in enumerate(calls):
        yield {
            "type": "function_call",
            "id": f"{name.replace('resp_', 'fc_', 1)}-{index}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    is_message = item["type"] == "message"
    empty: dict[str, Any] = {"content": []} if is_message else {"arguments": ""}
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", **empty}}
    if is_message:
        [part] = item["content"]
        text, logprobs = part["text"], part["logprobs"]
        at = {"item_id": item["id"], "content_index": 0}
        yield "response.content_part.added", {**at, "part": {**part, "text": "", "logprobs": []}}
        yield "response.output_text.delta", {**at, "delta": text, "logprobs": logprobs}
        yield "response.output_text.done", {**at, "text": text, "logprobs": logprobs}
        yield "response.content_part.done", {**at, "part": part}
    else:
        name, arguments = "response.function_call_arguments", item["arguments"]
        yield f"{name}.delta", {"item_id": item["id"], "delta": arguments}
        yield f"{name}.done", {"item_id": item["id"], "name": item["name"], "arguments": arguments}
    yield "response.output_item.done", {"item": item}
