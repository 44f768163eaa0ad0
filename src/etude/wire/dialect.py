"""Base classes for dialects (one agent-facing API, translated to and from recorded calls) and streams.

And what they translate: requests, and recorded answers with their tokens.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from etude.core.call import ChatRequest, Completion, Delta, Sampling, Token, TopLogprobs
from etude.core.errors import ImpossibleCall, RequestError
from etude.core.json_text import read_json
from etude.core.message import Message, Tool, message_text

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


def require_asked(completion: Completion, *, logprobs: bool = False, top: int = 0) -> None:
    """Raise ImpossibleCall for the first requested field that is missing; empty answers need no logprobs."""
    if completion.usage.completion_tokens == 0:
        return
    if top and not completion.top_logprobs:
        missing = "top_logprobs"
    elif logprobs and completion.logprobs is None:
        missing = "logprobs"
    else:
        return
    raise ImpossibleCall(
        f"the answer lacks what {missing} asks for; leave it out of the request or the config, or use an "
        "endpoint that returns it",
        param=missing,
    )


TokenBytes: TypeAlias = Callable[[int], bytes | None]
"""Returns the bytes of a token, or None if its tokenizer is not available here."""

TokenLogprob: TypeAlias = tuple[Token, float, TopLogprobs]
"""A sampled token, its logprob, and the likeliest tokens with theirs."""


_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """The facts about an answer that are known before its first token."""

    id: str
    model: str
    bytes_of: TokenBytes = lambda token: None
    tokens_as_ids: bool = False
    """Whether logprobs name tokens by their ids; tokens without known bytes are always named so."""

    def id_as(self, prefix: str) -> str:
        """Return the id with an API's prefix for a kind of object."""
        return prefix + self.id.removeprefix("chatcmpl-")

    def token_name(self, token: Token) -> str:
        """Return a token's name: its text, or vLLM's `token_id:7`."""
        if isinstance(token, str):
            return token
        if token < 0:
            return ""
        known = None if self.tokens_as_ids else self.bytes_of(token)
        return f"token_id:{token}" if known is None else known.decode(errors="replace")

    def bytes(self, token: Token) -> list[int] | None:
        """Return a token's bytes, however it is named, or None if they are unknown."""
        if isinstance(token, int):
            known = self.bytes_of(token) if token >= 0 else None
        else:
            # An endpoint without ids writes a replacement character for part of a character.
            known = None if _REPLACEMENT in token else token.encode()
        return None if known is None else [*known]

    def with_completion(self, completion: Completion) -> RecordedCompletion:
        """Return the answer with this heading."""
        return RecordedCompletion(
            self.id, self.model, self.bytes_of, self.tokens_as_ids, completion=completion
        )


@dataclass(frozen=True, slots=True)
class RecordedCompletion(AnswerHeader):
    """A recorded completion, as an API presents it."""

    completion: Completion = field(kw_only=True)

    @property
    def tokens(self) -> list[TokenLogprob]:
        """The sampled tokens with their logprobs; none if the engine does not give them."""
        return list_tokens(self.completion)


def list_tokens(source: Completion | Delta) -> list[TokenLogprob]:
    """Return the tokens of an answer or a piece of it, each with its logprob and alternatives."""
    ids: Sequence[Token] | None
    if isinstance(source, Completion):
        ids, tops = source.completion_ids, source.top_logprobs
        # An endpoint may give logprobs without token ids.
        ids = (source.token_texts or None) if ids is None else ids
    else:
        ids, tops = source.ids, source.top
    logprobs = source.logprobs or ()
    ids = ids if ids is not None else (-1,) * len(logprobs)
    tops = tops or ((),) * len(logprobs)
    return list(zip(ids, logprobs, tops, strict=False))


@dataclass(slots=True)
class StreamProgress:
    """The part of an answer that a stream has sent."""

    content: str = ""
    reasoning: str = ""
    tokens: int = 0
    """Number of tokens received, sent or waiting."""
    waiting: list[TokenLogprob] = field(default_factory=list)
    """Tokens whose text has not been sent yet."""

    def take(self, delta: Delta) -> None:
        """Record a piece."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.tokens += len(delta.ids)
        self.waiting += list_tokens(delta)

    def take_rest(self, completion: Completion) -> Delta:
        """Record the end of the answer, and return the text that has not been sent."""
        message, tokens = completion.message, list_tokens(completion)
        self.waiting += tokens[self.tokens :]
        self.tokens = len(tokens)
        content = unsent_text(message_text(message), self.content)
        reasoning = unsent_text(message.get("reasoning_content") or "", self.reasoning)
        self.content, self.reasoning = self.content + content, self.reasoning + reasoning
        return Delta(content, reasoning)


def unsent_text(text: str, given: str) -> str:
    """Return the part of a text after its sent beginning `given`; empty if it does not begin so."""
    return text[len(given) :] if text.startswith(given) else ""


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
    """The entry of `prompts` that this request continues."""
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
        """With `shared`, clients are unrelated: answers are found by name, and the latest are kept."""
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
    stream: ClassVar[type[Stream]]
    """Its streams, with the same content as a reply. An API without streams has none."""

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
        """Yield the events of a piece of an answer, or of the rest of the whole answer (`heading`)."""
        answer = heading.completion if isinstance(heading, RecordedCompletion) else None
        if index not in self.said:
            self.said[index] = StreamProgress()
            yield from self.begin(index, heading, (answer or delta).prompt_ids)
        if isinstance(heading, RecordedCompletion):
            yield from self.last(index, heading, self.said[index].take_rest(heading.completion))
        else:
            self.said[index].take(delta)
            yield from self.pieces(index, heading, delta)

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


def as_parts(content: Any) -> Any:
    """Return content as a list of parts; text becomes a single part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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
