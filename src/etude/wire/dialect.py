"""A dialect: one API that agents speak, translated to and from the calls that are recorded."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from etude.core.call import Delta
from etude.core.errors import RequestError
from etude.core.json_text import read_json
from etude.core.message import Message, Tool, text_of
from etude.wire.answers import Heading, RecordedCompletion, Said
from etude.wire.sampling import Flag, SamplingFields

Event = tuple[str | None, Any]
"""A server-sent event: its name, where the dialect names events, and its data; a text stays as it is."""

BOOKKEEPING = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "thread", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_salt"),
        *("request_id", "guided_decoding_backend"),
        # Of OpenAI's own models, which were trained on it; no other model has such a setting.
        "verbosity",
    }
)
"""Parameters of OpenAI's APIs, and of vLLM's, that change nothing about an answer."""

Neutral: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Values of parameters."""

ERROR_HEADER = "x-etude-error"
"""Response header: the class of the error that is behind a status of 400 or more."""

_KEPT_CONVERSATIONS = 4096
"""Of all clients of a server together."""

B = TypeVar("B", bound=BaseModel)

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_TYPE_TAG = re.compile(
    r"(str|int|float|bool|constrained-\w+|(list|tuple|dict|literal|function-\w+|nullable)\[.*)$"
)
"""Pydantic puts the members of a union into an error's place; clients know no such fields."""

RAW = "raw_arguments"
"""Stands for the arguments of a tool call that are no JSON object, where an API takes only objects."""


class RequestBody(SamplingFields):
    """The body of a request, which is honoured as it stands or refused.

    No parameter is ignored that would change the answer.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: Flag | None = None

    free: ClassVar[Collection[str]] = BOOKKEEPING
    """Parameters that change nothing about an answer, beside the fields of the model."""
    neutral: ClassVar[Neutral] = {"service_tier": ("auto", "default", "flex"), "priority": (0,)}
    """Parameters that cannot be honoured, and the values at which they change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_constraint(cls, body: Any) -> Any:
        """No API has it: each has fields of its own for the form of an answer."""
        if isinstance(body, dict) and body.get("constraint") is not None:
            raise _unsupported("constraint")
        return body

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> RequestBody:
        """Raises RequestError, which pydantic lets through, because it names the parameter."""
        for name, value in (self.model_extra or {}).items():
            if name in self.free or value is None:
                continue
            if name not in self.neutral:
                raise _unsupported(name)
            if value not in self.neutral[name]:
                raise RequestError(
                    f"parameter '{name}' can only be {self.neutral[name][0]!r} here, found {value!r:.80}",
                    param=name,
                )
        return self

    def request(self, **fields: Any) -> ChatBody:
        """The request, whatever API it came by, with the `fields` that are its body's own."""
        known: dict[str, Any] = {"model": self.model or "", "messages": (), "sampling": self.given()}
        return ChatBody(stream=bool(self.stream), **known | fields)


def _unsupported(name: str) -> RequestError:
    return RequestError(f"parameter '{name}' is not supported here; leave it out", param=name)


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
    echo: bool = False
    """Whether the prompt comes before the answer's text."""
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
        self.conversations[name] = replace(conversation, on_delta=None)
        if self._shared and len(self.conversations) > _KEPT_CONVERSATIONS:
            del self.conversations[next(iter(self.conversations))]

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
    def reply(
        self, answers: Sequence[RecordedCompletion], asked: ChatBody, body: Any, created: int
    ) -> dict[str, Any]:
        """The reply to `body`, which was read as `asked`; `created` in Unix seconds."""

    @abstractmethod
    def stream(self, asked: ChatBody, body: Any, created: int) -> Stream:
        """A new stream that says the same as a reply."""

    @staticmethod
    def error(status: int, message: str, *, param: str | None, code: str | None) -> dict[str, Any]:
        """The error object of a response with that status; `param` is the field of the request at fault."""
        return error_object(status, message, param=param, code=code)


class Stream(ABC):
    """The events of one streamed reply, made as its answers come.

    Pieces of text come first, where the engine gives any; whatever they left out, at an answer's end.
    """

    def __init__(self, asked: ChatBody) -> None:
        self.asked = asked
        self.said: dict[int, Said] = {}
        """By the number of the answer."""

    @abstractmethod
    def add(self, index: int, heading: Heading, delta: Delta) -> Iterator[Event]:
        """The events of a piece of an answer."""

    @abstractmethod
    def finish(self, index: int, answer: RecordedCompletion) -> Iterator[Event]:
        """The events of what is missing of an answer now that it is there."""

    @abstractmethod
    def end(self, reply: dict[str, Any]) -> Iterator[Event]:
        """The last events, once all answers are there."""


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object; its `type` follows from the status."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def server_sent(data: Any, name: str | None = None) -> bytes:
    """A server-sent event; its data are JSON, but for a text."""
    text = data if isinstance(data, str) else json.dumps(data)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


def usage_object(prompt: int, completion: int) -> dict[str, int]:
    """OpenAI's `usage`, from numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def validated(kind: type[B], body: Any, **defaults: Any) -> B:
    """A request by the model of its body. Raises RequestError with all that is wrong."""
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    try:
        return kind.model_validate(defaults | body)
    except ValidationError as error:
        message, param = problems_of(error.errors(include_url=False))
        raise RequestError(message, param=param) from error


def problems_of(errors: Iterable[Any]) -> tuple[str, str | None]:
    """Pydantic's errors as a sentence, and the first field that is wrong: `messages[0].role`."""
    problems, first = [], None
    for error in errors:
        field = ""
        for part in map(str, error["loc"]):
            if part not in ("body", "query", "path") and not _TYPE_TAG.match(part):
                field += f"[{part}]" if part.isdecimal() else f".{part}" if field else part
        first = first or field or None
        if error["type"] == "json_invalid":
            return f"the request is not JSON: {error.get('ctx', {}).get('error', '')}".rstrip(": "), None
        text = error["msg"].removeprefix("Value error, ")
        problems.append(f"{field}: {text}" if field else text)
    return "; ".join(dict.fromkeys(problems[:5])), first


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
