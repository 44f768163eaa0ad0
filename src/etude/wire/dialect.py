"""Base classes for dialects (one agent-facing API, translated to and from recorded calls) and streams."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic_core import to_json

from etude.core.call import ChatRequest, Completion, Delta, Sampling
from etude.core.errors import RequestError
from etude.core.json_text import read_json
from etude.core.message import Message, Tool, message_text
from etude.wire.answers import AnswerHeader, RecordedCompletion, StreamProgress

if TYPE_CHECKING:
    import httpx
    from starlette.responses import Response

Event = tuple[str | None, Any]
"""A server-sent event: its name, if the dialect names events, and its data; text is sent unchanged."""


ERROR_HEADER = "x-etude-error"
"""Response header: the class of the error that caused a status of 400 or more."""

_KEPT_CONVERSATIONS = 4096
"""Maximum number of stored conversations of all clients of a server."""


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
}

RAW = "raw_arguments"
"""Key for a tool call's arguments that are not a JSON object, in APIs that accept only objects."""


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A parsed request for completions."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters in the request, with the names of `Sampling`."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with a chunk that contains the usage."""
    logprobs: bool = False
    top_logprobs: int = 0
    """Number of likeliest tokens to return with each sampled one."""
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether logprobs name tokens by their ids."""
    n: int = 1
    """Number of completions of each prompt."""
    choice: int = 0
    """Index of the requested completion among the `n`."""
    tool_choice: str = "auto"
    """As in `ChatRequest`."""
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Texts or token ids to continue, instead of messages."""
    prompt: str | tuple[int, ...] | None = None
    """The one of `prompts` that this request is for."""
    function: str | None = None
    """The agent's function that makes the request, if the request's headers name one."""
    body: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The request as received."""
    created: int = field(default=0, compare=False)
    """Time of the request, in Unix seconds."""
    on_delta: Callable[[AnswerHeader, Delta], None] | None = field(default=None, compare=False)
    """Called with each piece of the answer, if the engine can stream."""

    def each(self) -> list[ChatBody]:
        """Return one request for each requested answer."""
        if self.n == 1 and not self.prompts:
            return [self]
        prompts = self.prompts or (None,)
        return [replace(self, prompt=prompt, choice=choice) for prompt in prompts for choice in range(self.n)]

    def as_request(self, sampling: Sampling, **fields: Any) -> ChatRequest:
        """Return the request to an engine for this one answer.

        For readers of the record, a message represents a prompt without messages.
        """
        prompt = self.prompt
        shown = prompt if isinstance(prompt, str | None) else f"({len(prompt)} token ids)"
        return ChatRequest(
            self.messages if prompt is None else ({"role": "user", "content": shown},),
            self.tools,
            sampling,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            template_options=self.template_options,
            prompt=prompt,
            top_logprobs=self.top_logprobs,
            **fields,
        )


class AnswerMemory:
    """The model's messages in an episode as it wrote them, found by the forms that clients send back.

    Translating back and forth loses details: whitespace in a tool call's arguments, fields that an API does
    not have. With the original message, the prompt extends the sampled tokens.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """With `shared`, the clients are unrelated: an answer is found only by its name, and only the latest
        conversations are kept."""
        self._shared = shared
        self._messages: dict[str, Message] = {}
        self.conversations: dict[str, ChatBody] = {}
        """The request and answer of each conversation, by the answer's name."""

    def add(self, message: Message) -> None:
        """Store a message of the model."""
        if not self._shared:
            self._messages[_key(message)] = self._messages[_key(message, thinking=True)] = message

    def keep(self, name: str, conversation: ChatBody) -> None:
        """Store a conversation up to the answer called `name`."""
        self.conversations[name] = replace(conversation, body={}, on_delta=None)
        if self._shared and len(self.conversations) > _KEPT_CONVERSATIONS:
            del self.conversations[next(iter(self.conversations))]

    def conversation(self, name: str | None, param: str) -> ChatBody:
        """Return the conversation up to an answer. Raises RequestError that names the field `param`."""
        if (known := self.conversations.get(name or "")) is None:
            unknown = f"{param} {name!r:.80} is not known here; send the whole conversation"
            raise RequestError(unknown, param=param)
        return known

    def restore(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        """Replace each known assistant message by the one that the model wrote.

        Clients may have left out its thinking.
        """
        return tuple(
            self._messages.get(_key(message, thinking="reasoning_content" in message), message)
            if message["role"] == "assistant"
            else message
            for message in messages
        )


class Dialect(ABC):
    """Reads requests and writes answers. An instance serves one episode, and remembers its answers."""

    error_event: ClassVar[str | None] = "error"
    """The event's name for a stream that failed half-way, in APIs that name events."""
    names: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The API's names for fields of a chat completion's request, if they differ."""

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory

    @abstractmethod
    def parse(self, body: Any) -> ChatBody:
        """Read the JSON of a request.

        Raises RequestError for missing or malformed fields, and for parameters it would have to ignore: a
        request is honoured completely or refused.
        """

    def own_name(self, field: str | None, body: Mapping[str, Any]) -> str | None:
        """Return the API's name of a field at fault; if it has several names, the one in the body."""
        own = self.names.get(field or "", (field,))
        return next((name for name in own if name in body), own[0])

    @abstractmethod
    def reply(self, answers: Sequence[RecordedCompletion], asked: ChatBody) -> dict[str, Any]:
        """Return the reply to a request."""

    @abstractmethod
    def stream(self, asked: ChatBody) -> Stream:
        """Return a new stream with the same content as a reply."""

    @staticmethod
    def error(status: int, message: str, *, param: str | None, code: str | None) -> dict[str, Any]:
        """Return the error object for a response's status; `param` is the request's field at fault.

        The default is OpenAI's error object.
        """
        kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Stream(ABC):
    """The events of one streamed reply, created as its answers arrive.

    Pieces of text come first, if the engine streams; the rest follows at the end of each answer.
    """

    def __init__(self, asked: ChatBody) -> None:
        self.asked = asked
        self.said: dict[int, StreamProgress] = {}
        """The sent part of each answer, by its index."""

    def add(self, index: int, heading: AnswerHeader, delta: Delta) -> Iterator[Event]:
        """Yield the events of a piece of an answer."""
        yield from self._begin_answer(index, heading, delta)
        self.said[index].take(delta)
        yield from self.pieces(index, heading, delta)

    def finish(self, index: int, answer: RecordedCompletion) -> Iterator[Event]:
        """Yield the events of the rest of an answer that is complete."""
        yield from self._begin_answer(index, answer, answer.completion)
        yield from self.last(index, answer, self.said[index].take_rest(answer.completion))

    def _begin_answer(self, index: int, heading: AnswerHeader, source: Delta | Completion) -> Iterator[Event]:
        if index not in self.said:
            self.said[index] = StreamProgress()
            yield from self.begin(index, heading, source.prompt_ids)

    @abstractmethod
    def begin(self, index: int, heading: AnswerHeader, prompt_ids: Sequence[int] | None) -> Iterator[Event]:
        """Yield the events before an answer's first piece."""

    @abstractmethod
    def pieces(self, index: int, heading: AnswerHeader, delta: Delta) -> Iterator[Event]:
        """Yield the events of a piece of text; `said` already contains it and the waiting tokens."""

    @abstractmethod
    def last(self, index: int, answer: RecordedCompletion, rest: Delta) -> Iterator[Event]:
        """Yield the events at the end of an answer, with the rest of its text."""

    @abstractmethod
    def end(self, reply: dict[str, Any]) -> Iterator[Event]:
        """Yield the last events, once all answers are complete."""


def server_sent(data: Any, name: str | None = None) -> bytes:
    """Encode a server-sent event; its data become JSON unless they are text."""
    text = data if isinstance(data, str) else json.dumps(data)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


def as_parts(content: Any) -> Any:
    """Return content as a list of parts; text becomes a single part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a message's tool call, with `arguments` as JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object; invalid ones under the key `raw_arguments`."""
    try:
        value = read_json(arguments, unique_keys=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {RAW: arguments}


def arguments_text(arguments: dict[str, Any]) -> str:
    """Reverse `arguments_object`, except for whitespace."""
    raw = arguments.get(RAW)
    return raw if len(arguments) == 1 and isinstance(raw, str) else json.dumps(arguments, ensure_ascii=False)


def _key(message: Message, *, thinking: bool = False) -> str:
    calls = [
        [call.get("id"), call["function"]["name"], arguments_object(str(call["function"]["arguments"]))]
        for call in message.get("tool_calls") or ()
    ]
    thoughts = [message.get("reasoning_content")] if thinking else []
    return json.dumps([message_text(message), calls, *thoughts], sort_keys=True)


Kind: TypeAlias = Literal["reasoning", "content"]
"""The kind of a block of text."""


class BlockStream(Stream):
    """A stream that opens and closes blocks, whose events a subclass defines; such APIs give one answer."""

    def __init__(self, asked: ChatBody) -> None:
        super().__init__(asked)
        self.number = -1
        """Index of the block that is open, or was open last."""
        self._open: Kind | None = None

    @abstractmethod
    def open_block(self, kind: Kind) -> Iterator[Event]:
        """Yield the events at the start of the block `number`."""

    @abstractmethod
    def block_piece(self, kind: Kind, text: str) -> Iterator[Event]:
        """Yield the events of a piece of its text; `said` has the waiting tokens."""

    @abstractmethod
    def close_block(self, kind: Kind, text: str, status: str) -> Iterator[Event]:
        """Yield the events at its end, with its whole text; `status` is `completed` or `incomplete`."""

    @abstractmethod
    def calls(self, answer: RecordedCompletion) -> Iterator[Event]:
        """Yield the events of the answer's tool calls."""

    def last(self, index: int, answer: RecordedCompletion, rest: Delta) -> Iterator[Event]:
        yield from self.pieces(index, answer, rest)
        calls = answer.completion.message.get("tool_calls")
        if self.number < 0 and not calls:
            yield from self._switch("content")
        is_cut = answer.completion.finish_reason == "length" and not (calls and self._open == "reasoning")
        yield from self._switch(None, "incomplete" if is_cut else "completed")
        yield from self.calls(answer)

    def pieces(self, index: int, heading: AnswerHeader, delta: Delta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._switch("reasoning")
            yield from self.block_piece("reasoning", delta.reasoning)
        if delta.content:
            yield from self._switch("content")
            yield from self.block_piece("content", delta.content)

    def _switch(self, kind: Kind | None, status: str = "completed") -> Iterator[Event]:
        if self._open == kind:
            return
        if self._open is not None:
            said = self.said[0].reasoning if self._open == "reasoning" else self.said[0].content
            yield from self.close_block(self._open, said, status)
        self._open = kind
        if kind is not None:
            self.number += 1
            yield from self.open_block(kind)


def model_object(name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's `model` object."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": "etude"}


_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response, whole or streamed."""

    status: int
    headers: Mapping[str, str]
    content: bytes | AsyncIterator[bytes]

    def as_httpx(self) -> httpx.Response:
        """Return the response for an httpx transport."""
        import httpx

        return httpx.Response(self.status, headers=self.headers, content=self.content)

    def as_starlette(self) -> Response:
        """Return the response for a Starlette server."""
        from starlette.responses import Response, StreamingResponse

        if isinstance(self.content, bytes):
            return Response(self.content, self.status, self.headers)
        return StreamingResponse(self.content, self.status, self.headers)


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """Return a response with a value as JSON text."""
    # Takes a fifth of the time of httpx's `json=`.
    return Reply(status, {**_JSON, **headers} if headers else _JSON, to_json(value))
