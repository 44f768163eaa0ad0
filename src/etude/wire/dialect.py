"""A dialect: one API that agents speak, translated to and from the calls that are recorded; its streams."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic_core import to_json

from etude.core.call import Completion, Delta
from etude.core.errors import RequestError
from etude.core.json_text import read_json
from etude.core.message import Message, Tool, text_of
from etude.wire.answers import Heading, RecordedCompletion, Said

if TYPE_CHECKING:
    import httpx
    from starlette.responses import Response

Event = tuple[str | None, Any]
"""A server-sent event: its name, where the dialect names events, and its data; a text stays as it is."""


ERROR_HEADER = "x-etude-error"
"""Response header: the class of the error that is behind a status of 400 or more."""

_KEPT_CONVERSATIONS = 4096
"""Of all clients of a server together."""


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
}

RAW = "raw_arguments"
"""Stands for the arguments of a tool call that are no JSON object, where an API takes only objects."""


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A request for a completion, taken apart."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters that the request gave, under the names of `Sampling`."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with a chunk that holds the usage."""
    logprobs: bool = False
    top_logprobs: int = 0
    """How many of the most likely tokens come with each sampled one."""
    prompt_logprobs: int | None = None
    """As in `ChatRequest`."""
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether the tokens of logprobs are named by their ids."""
    n: int = 1
    """Completions of each prompt."""
    choice: int = 0
    """Which of the `n` is asked for."""
    tool_choice: str = "auto"
    """As in `ChatRequest`."""
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Texts or token ids to go on from, where there are no messages."""
    prompt: str | tuple[int, ...] | None = None
    """The one of them that is asked for."""
    function: str | None = None
    """The function of the agent that asks, when the request's headers name one."""
    body: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The request as it came."""
    created: int = field(default=0, compare=False)
    """When that was, in Unix seconds."""
    on_delta: Callable[[Heading, Delta], None] | None = field(default=None, compare=False)
    """Called with each piece of the answer, by whoever can give any."""

    def each(self) -> list[ChatBody]:
        """A request for each answer that is asked for."""
        if self.n == 1 and not self.prompts:
            return [self]
        prompts = self.prompts or (None,)
        return [replace(self, prompt=prompt, choice=choice) for prompt in prompts for choice in range(self.n)]


class AnswerMemory:
    """The model's messages in an episode as it wrote them, by all forms in which clients send them back.

    A translation back and forth loses details (spaces in a tool call's arguments, fields that an API
    does not have). With the message as it was, the prompt extends the tokens that were sampled.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """With `shared` clients are strangers to each other: an answer is known to those who know its name,
        and only the latest are kept."""
        self._shared = shared
        self._messages: dict[str, Message] = {}
        self.conversations: dict[str, ChatBody] = {}
        """The requests up to an answer, and the answer, by the answer's name."""

    def add(self, message: Message) -> None:
        """Remember a message of the model."""
        if not self._shared:
            self._messages[_key(message)] = self._messages[_key(message, thinking=True)] = message

    def keep(self, name: str, conversation: ChatBody) -> None:
        """Remember a conversation up to the answer of that name."""
        self.conversations[name] = replace(conversation, body={}, on_delta=None)
        if self._shared and len(self.conversations) > _KEPT_CONVERSATIONS:
            del self.conversations[next(iter(self.conversations))]

    def conversation(self, name: str | None, param: str) -> ChatBody:
        """The conversation up to an answer. Raises RequestError, with the field that has the name."""
        if (known := self.conversations.get(name or "")) is None:
            unknown = f"{param} {name!r:.80} is not known here; send the whole conversation"
            raise RequestError(unknown, param=param)
        return known

    def restored(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        """The messages, with each of the assistant's that is known as the model wrote it.

        Clients may leave its thinking out.
        """
        return tuple(
            self._messages.get(_key(message, thinking="reasoning_content" in message), message)
            if message["role"] == "assistant"
            else message
            for message in messages
        )


class Dialect(ABC):
    """Reads requests and writes answers. An instance serves one episode, whose answers it remembers."""

    error_event: ClassVar[str | None] = "error"
    """The name of the event of a stream that failed half-way, where events have names."""
    names: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The API's own names of the fields of a chat completion's request, where it has others."""

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory

    @abstractmethod
    def parse(self, body: Any) -> ChatBody:
        """Read the JSON of a request.

        Raises RequestError for what is missing or malformed, and for parameters that would have to be
        ignored: a request is honoured as it stands or refused.
        """

    def own_name(self, field: str | None, body: Mapping[str, Any]) -> str | None:
        """The API's name of a field that is at fault: of several, the one that the body has."""
        own = self.names.get(field or "", (field,))
        return next((name for name in own if name in body), own[0])

    @abstractmethod
    def reply(self, answers: Sequence[RecordedCompletion], asked: ChatBody) -> dict[str, Any]:
        """The reply to a request."""

    @abstractmethod
    def stream(self, asked: ChatBody) -> Stream:
        """A new stream that says the same as a reply."""

    @staticmethod
    def error(status: int, message: str, *, param: str | None, code: str | None) -> dict[str, Any]:
        """The error object of a response with that status; `param` is the field of the request at fault.

        Here it is OpenAI's.
        """
        kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Stream(ABC):
    """The events of one streamed reply, made as its answers come.

    Pieces of text come first, where the engine gives any; whatever they left out, at an answer's end.
    """

    def __init__(self, asked: ChatBody) -> None:
        self.asked = asked
        self.said: dict[int, Said] = {}
        """By the number of the answer."""

    def add(self, index: int, heading: Heading, delta: Delta) -> Iterator[Event]:
        """The events of a piece of an answer."""
        yield from self._begun(index, heading, delta)
        self.said[index].take(delta)
        yield from self.pieces(index, heading, delta)

    def finish(self, index: int, answer: RecordedCompletion) -> Iterator[Event]:
        """The events of what is missing of an answer now that it is there."""
        yield from self._begun(index, answer, answer.completion)
        yield from self.last(index, answer, self.said[index].take_rest(answer.completion))

    def _begun(self, index: int, heading: Heading, source: Delta | Completion) -> Iterator[Event]:
        if index not in self.said:
            self.said[index] = Said()
            yield from self.begin(index, heading, source.prompt_ids)

    @abstractmethod
    def begin(self, index: int, heading: Heading, prompt_ids: Sequence[int] | None) -> Iterator[Event]:
        """The events before anything of an answer."""

    @abstractmethod
    def pieces(self, index: int, heading: Heading, delta: Delta) -> Iterator[Event]:
        """The events of a piece of text; `said` has it, and the tokens that wait."""

    @abstractmethod
    def last(self, index: int, answer: RecordedCompletion, rest: Delta) -> Iterator[Event]:
        """The events at the end of an answer, with the rest of its text."""

    @abstractmethod
    def end(self, reply: dict[str, Any]) -> Iterator[Event]:
        """The last events, once all answers are there."""


def server_sent(data: Any, name: str | None = None) -> bytes:
    """A server-sent event; its data are JSON, but for a text."""
    text = data if isinstance(data, str) else json.dumps(data)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


def as_parts(content: Any) -> Any:
    """Content in parts; a text is short for one of them."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call of a message, `arguments` as JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_object(arguments: str) -> dict[str, Any]:
    """The arguments of a tool call as an object; under `raw_arguments` where they are none."""
    try:
        value = read_json(arguments, unique_keys=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {RAW: arguments}


def arguments_text(arguments: dict[str, Any]) -> str:
    """The reverse of `arguments_object`, but for spaces."""
    raw = arguments.get(RAW)
    return raw if len(arguments) == 1 and isinstance(raw, str) else json.dumps(arguments, ensure_ascii=False)


def _key(message: Message, *, thinking: bool = False) -> str:
    calls = [
        [call.get("id"), call["function"]["name"], arguments_object(str(call["function"]["arguments"]))]
        for call in message.get("tool_calls") or ()
    ]
    thoughts = [message.get("reasoning_content")] if thinking else []
    return json.dumps([text_of(message), calls, *thoughts], sort_keys=True)


Kind: TypeAlias = Literal["reasoning", "content"]
"""Of a block of text."""


class BlockStream(Stream):
    """Opens and closes blocks; a subclass has the words for it. Such APIs give one answer at a time."""

    def __init__(self, asked: ChatBody) -> None:
        super().__init__(asked)
        self.number = -1
        """Of the block that is open, or was open last."""
        self._open: Kind | None = None

    @abstractmethod
    def opened(self, kind: Kind) -> Iterator[Event]:
        """The events at the beginning of the block `number`."""

    @abstractmethod
    def piece(self, kind: Kind, text: str) -> Iterator[Event]:
        """The events of a piece of its text; `said` has the tokens that wait."""

    @abstractmethod
    def closed(self, kind: Kind, text: str) -> Iterator[Event]:
        """The events at its end, with all of its text."""

    @abstractmethod
    def calls(self, answer: RecordedCompletion) -> Iterator[Event]:
        """The events of the answer's calls of tools."""

    def last(self, index: int, answer: RecordedCompletion, rest: Delta) -> Iterator[Event]:
        yield from self.pieces(index, answer, rest)
        if self.number < 0 and not answer.completion.message.get("tool_calls"):
            yield from self._switch("content")
        yield from self._switch(None)
        yield from self.calls(answer)

    def pieces(self, index: int, heading: Heading, delta: Delta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._switch("reasoning")
            yield from self.piece("reasoning", delta.reasoning)
        if delta.content:
            yield from self._switch("content")
            yield from self.piece("content", delta.content)

    def _switch(self, kind: Kind | None) -> Iterator[Event]:
        if self._open == kind:
            return
        if self._open is not None:
            said = self.said[0].reasoning if self._open == "reasoning" else self.said[0].content
            yield from self.closed(self._open, said)
        self._open = kind
        if kind is not None:
            self.number += 1
            yield from self.opened(kind)


_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, whole or piece by piece."""

    status: int
    headers: Mapping[str, str]
    content: bytes | AsyncIterator[bytes]

    def as_httpx(self) -> httpx.Response:
        """As a client of httpx gets it from its transport."""
        import httpx

        return httpx.Response(self.status, headers=self.headers, content=self.content)

    def as_starlette(self) -> Response:
        """As a server sends it."""
        from starlette.responses import Response, StreamingResponse

        if isinstance(self.content, bytes):
            return Response(self.content, self.status, self.headers)
        return StreamingResponse(self.content, self.status, self.headers)


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """The JSON text of a value."""
    # A fifth of the time that httpx's `json=` takes.
    return Reply(status, {**_JSON, **headers} if headers else _JSON, to_json(value))
