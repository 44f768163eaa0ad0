"""OpenAI's Responses API, as agents speak it: requests in, answers out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field

from etude.core.errors import RequestError
from etude.core.message import Message, Tool
from etude.wire.chat import recorded_logprobs
from etude.wire.dialect import (
    BOOKKEEPING,
    ChatBody,
    Dialect,
    Event,
    Neutral,
    RecordedCompletion,
    RequestBody,
    tool_call,
    validated,
)

_LOGPROBS = "message.output_text.logprobs"
_REPEATED = ("instructions", "previous_response_id", "temperature", "top_p", "max_output_tokens")
"""Fields of a request that its response has too."""


def _as_parts(content: Any) -> Any:
    """Content in parts; a text is short for one of them."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_items(value: Any) -> Any:
    """The input as items: a text is a message of the user's, and so are items without a type."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": "message"} | item if isinstance(item, dict) else item for item in value]


class _Part(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


_Parts: TypeAlias = Annotated[list[_Part], BeforeValidator(_as_parts)]


class _Message(BaseModel):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


class _Call(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _CallOutput(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: _Parts


class _Reasoning(BaseModel):
    """Thoughts, which later prompts do not have."""

    type: Literal["reasoning"]


_Item: TypeAlias = Annotated[_Message | _Call | _CallOutput | _Reasoning, Field(discriminator="type")]


class _Tool(BaseModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        """The tool as chat completions have it."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class ResponsesBody(RequestBody):
    """The body of `POST /responses`."""

    free = BOOKKEEPING | {"stream_options", "top_logprobs", "prompt_cache_retention", "prompt_cache_options"}
    neutral: ClassVar[Neutral] = {
        "background": (False,),
        "parallel_tool_calls": (True,),
        "reasoning": ({},),
        "text": ({"format": {"type": "text"}}, {}),
        "tool_choice": ("auto",),
        "truncation": ("disabled", "auto"),
    }

    input: Annotated[list[_Item], BeforeValidator(_as_items)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    tools: list[_Tool] | None = None
    max_tokens: int | None = Field(default=None, alias="max_output_tokens", ge=1)

    def request(self) -> ChatBody:
        """The request, its instructions as the first message."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return replace(
            super().request(),
            messages=(*first, *_messages(self.input)),
            tools=tuple(tool.as_chat() for tool in self.tools or ()),
            logprobs=_LOGPROBS in (self.include or ()),
        )


class ResponsesDialect(Dialect):
    """`POST /responses`. An answer can be gone on from with `previous_response_id`."""

    def parse(self, body: Any) -> ChatBody:
        """Read a request. Raises RequestError for items and tools too that a chat has no place for."""
        known = validated(ResponsesBody, body)
        asked = known.request()
        earlier = self._earlier(known.previous_response_id)
        head = 1 if known.instructions else 0
        messages = (*asked.messages[:head], *earlier, *self._memory.restored(asked.messages[head:]))
        if not messages:
            raise RequestError("input must hold at least one message, found none")
        return replace(asked, messages=messages)

    def reply(self, recorded: RecordedCompletion, asked: ChatBody, body: Any, created: int) -> dict[str, Any]:
        """The `response` object, which is remembered by its name."""
        # As much a function of the request as the completion's.
        name, completion = f"resp_{recorded.id.removeprefix('chatcmpl-')}", recorded.completion
        self._memory.add(completion.message)
        # Instructions are of one request; the API does not carry them over.
        own = asked.messages[1 if body.get("instructions") else 0 :]
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
            **{field: body.get(field) for field in _REPEATED},
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

    def _earlier(self, name: str | None) -> tuple[Message, ...]:
        if name is None:
            return ()
        if name not in self._memory.conversations:
            raise RequestError(f"previous_response_id {name!r:.80} is no response of this episode")
        return self._memory.conversations[name]


def _messages(items: Iterable[_Item]) -> list[Message]:
    """The chat messages of the input: items of one turn of the assistant are one message."""
    messages: list[Message] = []
    is_open = False
    for item in items:
        if isinstance(item, _Reasoning):
            continue
        by_assistant = isinstance(item, _Call) or (isinstance(item, _Message) and item.role == "assistant")
        if by_assistant and not is_open:
            messages.append({"role": "assistant", "content": None})
        is_open = by_assistant
        if isinstance(item, _Call):
            call = tool_call(item.call_id, item.name, item.arguments)
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, _CallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif by_assistant:
            messages[-1]["content"] = (messages[-1]["content"] or "") + _text(item.content)
        else:
            messages.append({"role": item.role, "content": _text(item.content)})
    return messages


def _text(parts: Iterable[_Part]) -> str:
    return "".join(part.text for part in parts)


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
