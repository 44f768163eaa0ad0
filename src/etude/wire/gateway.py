"""The agent-facing APIs on top of a callable that makes and records the calls, and clients for them.

The clients are real OpenAI clients whose requests never leave the process.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import httpx
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from etude.core.call import ChatRequest, Delta
from etude.core.errors import EngineError, EtudeError, ImpossibleCall, PromptTooLong, RequestError
from etude.core.json_text import read_json
from etude.core.threads import call_off_loop
from etude.wire.chat import ChatDialect, CompletionsDialect
from etude.wire.dialect import (
    ERROR_HEADER,
    AnswerHeader,
    AnswerMemory,
    ChatBody,
    Dialect,
    RecordedCompletion,
    require_asked,
)
from etude.wire.messages import MessagesDialect
from etude.wire.responses import ResponsesDialect

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

Handler: TypeAlias = Callable[[ChatBody], Awaitable[RecordedCompletion]]
"""Makes and records a requested call. Raises RequestError if the request is wrong, EngineError if the
model has no answer, and another EtudeError once no more calls are allowed."""


RunOnLoop: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the event loop, and waits for its result."""

FUNCTION_HEADER = "x-etude-function"
"""Request header: the agent's function that makes the call."""

_DIALECTS: Mapping[str, type[Dialect]] = {
    "/chat/completions": ChatDialect,
    "/completions": CompletionsDialect,
    "/responses": ResponsesDialect,
    "/messages": MessagesDialect,
}
"""The dialect of each request path, without `/v1`."""


_HOST = "recorded.invalid"
BASE_URL, API_KEY = f"http://{_HOST}/v1", "recorded"
"""The address and key of recording clients. Nothing is sent there."""
_SETTINGS: dict[str, Any] = {"api_key": API_KEY, "base_url": BASE_URL, "max_retries": 0, "timeout": None}
"""No client retries or timeouts: the handler's engine retries, and the episode's timeout ends a request."""


COUNT_TOKENS = "/messages/count_tokens"


class Readers(Protocol):
    """The models behind a gateway, and their tokenizers and templates."""

    def models(self) -> list[dict[str, Any]]:
        """Return OpenAI's `model` object of each model."""

    def reader(self, model: str) -> AbstractAsyncContextManager[Any]:
        """Open the `TextCodec` of a model; "" names the default model. Raises EtudeError."""


@dataclass(eq=False)
class Gateway:
    """Serves chat completions, the Responses API and Anthropic's messages to one episode.

    It remembers the episode's answers, to recognise conversations that come back in an API's format.
    """

    handler: Handler
    memory: AnswerMemory = field(default_factory=AnswerMemory)
    """Shared by all gateways of an episode."""
    readers: Readers | None = None
    """They serve `/models` and token counts."""
    finishes: bool = True
    """Whether an answer is sampled to its end after its client has hung up."""

    def __post_init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()
        self._dialects = {path: dialect(self.memory) for path, dialect in _DIALECTS.items()}

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Answer one HTTP request.

        Every error becomes the API's error object. The client shall not retry, since the engine has.
        """
        try:
            return await self.respond(method, path, headers, body)
        except EtudeError as error:
            return error_response(path, error)

    async def respond(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Answer a request, for callers with custom error responses. Raises EtudeError."""
        path = _plain_path(path)
        known = [f"POST {each}" for each in _DIALECTS]
        if self.readers is not None:
            known += [f"POST {COUNT_TOKENS}", "GET /models"]
        if f"{method} {path}" not in known:
            message = f"{method} {path} is not served here; the server answers {', '.join(known)}"
            error = find_dialect(path).error(404, message, param=None, code="unknown_url")
            return _json_response(error, 404, {"x-should-retry": "false"})
        if self.readers is not None and method == "GET":
            return _json_response({"object": "list", "data": self.readers.models(), "has_more": False})
        if path == COUNT_TOKENS and self.readers is not None:
            asked = await call_off_loop(len(body), self._read, MessagesDialect(AnswerMemory()), body)
            request = ChatRequest(asked.messages, asked.tools, template_options=asked.template_options)
            async with self.readers.reader(asked.model) as codec:
                prompt = await call_off_loop(len(body), codec.template.prompt, request)
                return _json_response({"input_tokens": len(prompt.ids)})
        dialect = self._dialects[path]
        asked = await call_off_loop(len(body), self._read, dialect, body)
        if (function := headers.get(FUNCTION_HEADER)) is not None:
            asked = replace(asked, function=function)
        try:
            if asked.stream:
                return await self._start_stream(dialect, asked)
            tasks = [asyncio.ensure_future(self._answer_one(each)) for each in asked.each()]
            try:
                answers = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        except ImpossibleCall as error:
            error.param = dialect.own_name(error.param, asked.body)
            raise
        return _json_response(dialect.reply(answers, asked))

    def _read(self, dialect: Dialect, body: bytes) -> ChatBody:
        """Parse the request in a body. Raises RequestError."""
        try:
            data = read_json(body)
        except ValueError as error:
            raise RequestError(f"the request is not JSON: {error}") from error
        if isinstance(data, dict):
            data = {name: value for name, value in data.items() if value is not None}
        return replace(dialect.parse(data), body=data, created=int(time.time()))

    async def _answer_one(self, asked: ChatBody) -> RecordedCompletion:
        """Return one answer. Raises the handler's errors, and ImpossibleCall for missing fields."""
        answer = await self.handler(asked)
        require_asked(answer.completion, logprobs=asked.logprobs, top=asked.top_logprobs)
        return answer

    async def _start_stream(self, dialect: Dialect, asked: ChatBody) -> Response:
        """Start a stream once its first piece is available: a failure before that can still have a status."""
        news: asyncio.Queue[_News] = asyncio.Queue()
        sampling = asyncio.create_task(_listen(self._answer_one, asked.each(), news))
        self._under_way.add(sampling)
        sampling.add_done_callback(self._under_way.discard)
        try:
            first = await news.get()
        except BaseException:
            sampling.cancel()
            raise
        if isinstance(first, Exception):
            raise first

        async def send_events() -> AsyncIterator[bytes]:
            try:
                async for event in _events(dialect, asked, first, news):
                    yield event
            finally:
                if not self.finishes:
                    sampling.cancel()

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(send_events(), headers=headers, media_type="text/event-stream")


_News: TypeAlias = tuple[int, AnswerHeader, Delta] | Exception | None
"""A piece of an answer, or the whole answer as the heading; an error; or None at the end."""


def server_sent(name: str | None, data: Any) -> bytes:
    """Encode a server-sent event; its data become JSON unless they are text."""
    text = data if isinstance(data, str) else json.dumps(data)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


async def _events(
    dialect: Dialect, asked: ChatBody, item: _News, news: asyncio.Queue[_News]
) -> AsyncIterator[bytes]:
    """Yield a stream's events: for `item`, for the items that follow in `news`, and at the end."""
    answers: dict[int, RecordedCompletion] = {}
    stream = dialect.stream(asked)
    while item is not None:
        if isinstance(item, Exception):
            failure = item if isinstance(item, EtudeError) else EngineError(str(item))
            yield server_sent(dialect.error_event, _error_object(type(dialect), failure))
            return
        index, heading, delta = item
        if isinstance(heading, RecordedCompletion):
            answers[index] = heading
        if text := b"".join(server_sent(*event) for event in stream.add(index, heading, delta)):
            yield text
        item = await news.get()
    reply = dialect.reply([answers[index] for index in sorted(answers)], asked)
    yield b"".join(server_sent(*event) for event in stream.end(reply))


async def _listen(handler: Handler, requests: Sequence[ChatBody], news: asyncio.Queue[_News]) -> None:
    """Put all pieces of all answers into the queue as they arrive."""

    async def answer(index: int, request: ChatBody) -> None:
        def on_delta(heading: AnswerHeader, delta: Delta) -> None:
            news.put_nowait((index, heading, delta))

        news.put_nowait((index, await handler(replace(request, on_delta=on_delta)), Delta()))

    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(answer(index, request))
    except* Exception as errors:  # noqa: BLE001
        # The reader of the queue must get any error: a server's handler raises its own kinds.
        first: Exception = errors
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        news.put_nowait(first)
    news.put_nowait(None)


def error_response(path: str, error: EtudeError) -> Response:
    """Return an error response in the format of the path's API."""
    headers = {"x-should-retry": "false", ERROR_HEADER: type(error).__name__}
    return _json_response(_error_object(find_dialect(path), error), _http_status(error), headers)


def _error_object(dialect: type[Dialect], error: EtudeError) -> dict[str, Any]:
    param = getattr(error, "param", None)
    return dialect.error(_http_status(error), str(error), param=param, code=choose_code(error))


def find_dialect(path: str) -> type[Dialect]:
    """Return the dialect for a path's error responses."""
    path = _plain_path(path)
    return MessagesDialect if path.startswith("/messages") else _DIALECTS.get(path, ChatDialect)


def choose_code(error: EtudeError) -> str | None:
    """Return OpenAI's code for an error, or None if it has none."""
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    return "invalid_value" if isinstance(error, RequestError | ImpossibleCall) else None


def _http_status(error: EtudeError) -> int:
    if isinstance(error, RequestError | ImpossibleCall):
        return 400
    return 500 if isinstance(error, EngineError) else 409


def _plain_path(path: str) -> str:
    """Return the path without any leading `/v1`; some clients add it twice."""
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    return path


def _json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # Takes a fifth of the time of httpx's `json=`.
    return Response(to_json(value), status, headers, "application/json")


def as_httpx(response: Response) -> httpx.Response:
    """Return the response for an httpx transport."""
    content: Any = response.body_iterator if isinstance(response, StreamingResponse) else response.body
    return httpx.Response(response.status_code, headers=response.raw_headers, content=content)


class RecordingTransport(httpx.AsyncBaseTransport, httpx.BaseTransport):
    """Passes each request to a handler and returns its response, without a socket.

    Clients without asyncio need `run`, which waits for coroutines on the event loop.
    """

    def __init__(
        self, handler: Handler, memory: AnswerMemory | None = None, run: RunOnLoop | None = None
    ) -> None:
        self._gateway = Gateway(handler, memory or AnswerMemory())
        self._run: Any = run

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer an httpx request."""
        return as_httpx(await self._respond(request, await request.aread()))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer an httpx request of a client without asyncio."""
        response = self._run(self._respond(request, request.read()))
        if isinstance(response, StreamingResponse):
            response.body_iterator = self._pieces(aiter(response.body_iterator))  # type: ignore[assignment]
        return as_httpx(response)

    async def _respond(self, request: httpx.Request, body: bytes) -> Response:
        """Return the response to a request. One that is meant for another server is an error."""
        path = request.url.path
        if request.url.host == _HOST:
            return await self._gateway.answer(request.method, path, request.headers, body)
        error = RequestError(
            f"this is the episode's client, which asks only the recorded models and not {request.url}; to "
            "ask another server, make a client of its own: openai.AsyncOpenAI(base_url=…, api_key=…)"
        )
        return error_response(path, error)

    def _pieces(self, pieces: AsyncIterator[Any]) -> Iterator[bytes]:
        async def next_piece() -> Any:
            return await anext(pieces, None)

        while (piece := self._run(next_piece())) is not None:
            yield piece


def recording_client(handler: Handler, memory: AnswerMemory | None = None) -> AsyncOpenAI:
    """Return an `AsyncOpenAI` client whose calls are made and recorded by `handler`."""
    from openai import AsyncOpenAI

    # Version 3 of the SDK is annotated with httpx2, but also accepts an httpx client.
    http_client: Any = httpx.AsyncClient(transport=RecordingTransport(handler, memory))
    return AsyncOpenAI(**_SETTINGS, http_client=http_client)


def blocking_recording_client(handler: Handler, run: RunOnLoop, memory: AnswerMemory) -> OpenAI:
    """Return an `OpenAI` client for functions without asyncio; see `recording_client`."""
    from openai import OpenAI

    http_client: Any = httpx.Client(transport=RecordingTransport(handler, memory, run))
    return OpenAI(**_SETTINGS, http_client=http_client)
