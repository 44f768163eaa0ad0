"""OpenAI's Responses API: requests in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from etude.wire.openai_format import error_to_wire
from etude.wire.responses_wire import response_events, response_id, response_object
from etude.wire.said import Said

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = {_LOGPROBS, "reasoning.encrypted_content"}
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""Names of sampling parameters, and what they are called here."""

_READ_HERE = {"model", "input", "instructions", "tools", "previous_response_id", "include", *_SAMPLING}
_PRESENTATION = {"stream", "stream_options", "top_logprobs"}
_BOOKKEEPING = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_FREE = _READ_HERE | _PRESENTATION | _BOOKKEEPING | {"prompt_cache_retention", "prompt_cache_options"}
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


class ResponsesDialect:
    """`POST /responses`. What it answered can be gone on from with `previous_response_id`."""

    def __init__(self, said: Said) -> None:
        self._said = said

    def parse(self, body: Any) -> ChatBody:
        """See Dialect. Raises RequestError for items and tools that a chat has no place for."""
        body = require_object(body)
        require_honoured(body, _FREE, _NEUTRAL)
        include = body.get("include") or []
        unknown = [one for one in include if one not in _INCLUDED]
        if unknown:
            raise RequestError(f"'include' of {unknown[0]!r} is not supported for a recorded model")
        messages = (
            *_instructions(body),
            *self._earlier(body.get("previous_response_id")),
            *self._said.as_said(_messages(body.get("input"))),
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
        """See Dialect."""
        self._remember(recorded, asked, body)
        return response_object(recorded, asked, body, created)

    def events(
        self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int
    ) -> Iterator[Event]:
        """See Dialect."""
        self._remember(recorded, asked, body)
        return response_events(response_object(recorded, asked, body, created))

    def error(self, message: str, *, kind: str, code: str | None) -> dict[str, Any]:
        """See Dialect."""
        return error_to_wire(message, kind=kind, code=code)

    def _remember(self, recorded: RecordedCompletion, asked: ChatBody, body: Any) -> None:
        message = recorded.completion.message
        self._said.add(message)
        # Instructions are of one request; the API does not carry them over.
        own = asked.messages[len(_instructions(body)) :]
        self._said.conversations[response_id(recorded)] = (*own, message)

    def _earlier(self, name: Any) -> tuple[Message, ...]:
        if name is None:
            return ()
        if name not in self._said.conversations:
            raise RequestError(f"previous_response_id {name!r:.80} is no response of this episode")
        return self._said.conversations[name]


def _instructions(body: Mapping[str, Any]) -> tuple[Message, ...]:
    text = body.get("instructions")
    return () if not text else ({"role": "system", "content": required(body, "instructions", "the request")},)


def _messages(value: Any) -> list[Message]:
    """The chat messages of the input: items of one turn of the assistant are one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    found: list[Message] = []
    is_open = False
    for place, item in enumerate(objects_in(value, "input")):
        where, kind = f"input[{place}]", item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call_output":
            output = text_in(item.get("output"), f"{where}.output", _TEXT)
            found.append(
                {"role": "tool", "tool_call_id": required(item, "call_id", where), "content": output}
            )
        elif kind == "function_call" or (kind == "message" and item.get("role") == "assistant"):
            if not is_open:
                found.append({"role": "assistant", "content": None})
            _add(found[-1], item, where)
            is_open = True
            continue
        elif kind == "message":
            found.append(_message(item, where))
        else:
            raise RequestError(f"{where}: items of type {kind!r:.40} are not supported for a recorded model")
        is_open = False
    return found


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = required(item, "role", where)
    if role not in _ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}, found {role!r:.40}")
    return {"role": role, "content": text_in(item.get("content"), f"{where}.content", _TEXT)}


def _add(message: Message, item: Mapping[str, Any], where: str) -> None:
    """Add an item of the assistant to its message."""
    if item.get("type") != "function_call":
        text = text_in(item.get("content"), f"{where}.content", _TEXT)
        message["content"] = (message["content"] or "") + text
        return
    function = {name: required(item, name, where) for name in ("name", "arguments")}
    call = {"id": required(item, "call_id", where), "type": "function", "function": function}
    message.setdefault("tool_calls", []).append(call)


def _tool(tool: Mapping[str, Any]) -> Tool:
    if tool.get("type") != "function":
        raise RequestError(
            f"only tools of type 'function' are supported for a recorded model, found {tool!r:.80}"
        )
    kept: Sequence[str] = ("name", "description", "parameters", "strict")
    required(tool, "name", "a tool")
    function = {name: tool[name] for name in kept if tool.get(name) is not None}
    return {"type": "function", "function": function}
