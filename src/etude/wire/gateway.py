"""The APIs that agents speak, over a callable that makes and records the calls, and clients for them.

The clients are real OpenAI clients whose requests never leave the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx

from etude.core.call import Delta
from etude.core.errors import EngineError, EtudeError, ImpossibleCall, PromptTooLong, RequestError
from etude.core.json_text import read_json
from etude.core.threads import beside_loop
from etude.wire.answers import Heading, RecordedCompletion, require_asked
from etude.wire.chat import ChatDialect, CompletionsDialect
from etude.wire.dialect import ERROR_HEADER, AnswerMemory, ChatBody, Dialect, Reply, json_reply, server_sent
from etude.wire.messages import MessagesDialect
from etude.wire.responses import ResponsesDialect
from etude.wire.tokens import TOKEN_PATHS, Readers, models_reply, token_reply

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

Handler: TypeAlias = Callable[[ChatBody], Awaitable[RecordedCompletion]]
"""Makes and records the call that a request asks for. Raises RequestError when the request is wrong,
EngineError when the model has no answer, another EtudeError when no calls may be made any more."""


RunOnLoop: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the event loop, and waits for it."""

FUNCTION_HEADER = "x-etude-function"
"""Request header: the function of the agent that makes the call."""

_DIALECTS: Mapping[str, type[Dialect]] = {
    "/chat/completions": ChatDialect,
    "/completions": CompletionsDialect,
    "/responses": ResponsesDialect,
    "/messages": MessagesDialect,
}
"""By the path of their requests without `/v1`."""


_SETTINGS: dict[str, Any] = {
    "api_key": "recorded",
    "base_url": "http://recorded.invalid/v1",
    "max_retries": 0,
    "timeout": None,
}
"""The engine behind the handler retries, and the episode's timeout ends a request."""


class Gateway:
    """Chat completions, the Responses API and Anthropic's messages for one episode.

    It remembers the episode's answers, so that a conversation that comes back in an API's own words is
    the one that was recorded.
    """

    def __init__(
        self,
        handler: Handler,
        memory: AnswerMemory | None = None,
        readers: Readers | None = None,
        *,
        defaults: Callable[[str], Mapping[str, Any]] = lambda model: {},
        finishes: bool = True,
    ) -> None:
        """`memory` is shared by all gateways of an episode. `readers` are for `/models` and counting tokens.

        `defaults` are the parameters of requests to a model, where they do not have them. `finishes` tells
        whether an answer is sampled to its end when its client has hung up.
        """
        self._handler = handler
        self._readers = readers
        self._defaults = defaults
        self._finishes = finishes
        self._under_way: set[asyncio.Task[None]] = set()
        memory = memory or AnswerMemory()
        self._dialects = {path: dialect(memory) for path, dialect in _DIALECTS.items()}

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Answer one HTTP request.

        All errors come back as the API's error object, and tell its client not to retry: what could be
        retried has been retried by the engine.
        """
        try:
            return await self.respond(method, path, headers, body)
        except EtudeError as error:
            return error_response(path, _status_of(error), str(error), code=code_of(error), cause=error)

    async def respond(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """The same, for callers with error responses of their own. Raises EtudeError."""
        path = _plain_path(path)
        if (refusal := self._refusal(method, path)) is not None:
            return refusal
        if method == "GET" and self._readers is not None:
            reply = models_reply(path, self._readers)
            if reply is None:
                message = f"there is no model '{path.removeprefix('/models/')}'"
                return error_response(path, 404, message, param="model", code="model_not_found")
            return json_reply(reply)
        if path in TOKEN_PATHS and self._readers is not None:
            data = await beside_loop(len(body), _value, body)
            return json_reply(await token_reply(path, data, len(body), self._readers))
        dialect = self._dialects[path]
        asked = await beside_loop(len(body), self._read, dialect, body)
        if (function := headers.get(FUNCTION_HEADER)) is not None:
            asked = replace(asked, function=function)
        try:
            if asked.stream:
                return await self._streamed(dialect, asked)
            answers = await _all(self._answered, asked.each())
        except ImpossibleCall as error:
            error.param = dialect.own_name(error.param, asked.body)
            raise
        return json_reply(dialect.reply(answers, asked))

    def _read(self, dialect: Dialect, body: bytes) -> ChatBody:
        """The request of a body. Raises RequestError."""
        data = _value(body)
        if isinstance(data, dict):
            given = {name: value for name, value in data.items() if value is not None}
            data = {**self._defaults(str(data.get("model"))), **given}
        return replace(dialect.parse(data), body=data, created=int(time.time()))

    async def _answered(self, asked: ChatBody) -> RecordedCompletion:
        """One answer. Raises as the handler does, and ImpossibleCall where it lacks what was asked for."""
        answer = await self._handler(asked)
        top, prompt = asked.top_logprobs, asked.prompt_logprobs is not None
        require_asked(answer.completion, logprobs=asked.logprobs, top=top, prompt=prompt)
        return answer

    async def _streamed(self, dialect: Dialect, asked: ChatBody) -> Reply:
        """A stream, once there is something to put into it: before that, a failure has a status."""
        news: asyncio.Queue[_News] = asyncio.Queue()
        sampling = asyncio.create_task(_listen(self._answered, asked.each(), news))
        self._under_way.add(sampling)
        sampling.add_done_callback(self._under_way.discard)
        try:
            first = await news.get()
        except BaseException:
            sampling.cancel()
            raise
        if isinstance(first, Exception):
            raise first

        events = _events(dialect, asked, first, news)

        async def sent() -> AsyncIterator[bytes]:
            try:
                async for event in events:
                    yield event
            finally:
                if not self._finishes:
                    sampling.cancel()

        return Reply(200, _STREAM_HEADERS, sent())

    def _refusal(self, method: str, path: str) -> Reply | None:
        """The answer to a request that there is no answer to; None where there may be one."""
        has_models = self._readers is not None
        is_models = has_models and (path == "/models" or path.startswith("/models/"))
        known = [*_DIALECTS, *(TOKEN_PATHS if has_models else ())]
        if not is_models and path not in known:
            message = f"{method} {path} is not served here; served are POST {', '.join(known)}"
            return error_response(path, 404, message, code="unknown_url")
        wanted = "GET" if is_models else "POST"
        if method == wanted:
            return None
        message = f"{path} takes {wanted}, not {method}"
        answer = error_response(path, 405, message, code="method_not_allowed")
        return replace(answer, headers={**answer.headers, "allow": wanted})


_News: TypeAlias = tuple[int, Heading, Delta] | Exception | None
"""A piece of an answer, or the answer in place of a heading; an error; or that there is no more."""

_STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


async def _events(
    dialect: Dialect, asked: ChatBody, item: _News, news: asyncio.Queue[_News]
) -> AsyncIterator[bytes]:
    """The events of a stream: those of `item`, of all that comes after it, and of the end."""
    answers: dict[int, RecordedCompletion] = {}
    stream = dialect.stream(asked)
    while item is not None:
        if isinstance(item, Exception):
            failure = item if isinstance(item, EtudeError) else EngineError(str(item))
            error = dialect.error(_status_of(failure), str(failure), param=None, code=code_of(failure))
            yield server_sent(error, dialect.error_event)
            return
        index, heading, delta = item
        if isinstance(heading, RecordedCompletion):
            answers[index] = heading
            made = stream.finish(index, heading)
        else:
            made = stream.add(index, heading, delta)
        if text := b"".join(server_sent(data, name) for name, data in made):
            yield text
        item = await news.get()
    reply = dialect.reply([answers[index] for index in sorted(answers)], asked)
    yield b"".join(server_sent(data, name) for name, data in stream.end(reply))


def _value(body: bytes) -> Any:
    try:
        return read_json(body)
    except ValueError as error:
        raise RequestError(f"the request is not JSON: {error}") from error


async def _all(handler: Handler, requests: Sequence[ChatBody]) -> list[RecordedCompletion]:
    """All answers, in order. When one fails or the caller is cancelled, all are given up."""
    if len(requests) == 1:  # Without a task of its own.
        return [await handler(requests[0])]
    tasks = [asyncio.ensure_future(handler(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _listen(handler: Handler, requests: Sequence[ChatBody], news: asyncio.Queue[_News]) -> None:
    """Put all pieces of all answers into the queue as they come."""

    async def answer(index: int, request: ChatBody) -> None:
        def on_delta(heading: Heading, delta: Delta) -> None:
            news.put_nowait((index, heading, delta))

        recorded = await handler(replace(request, on_delta=on_delta))
        news.put_nowait((index, recorded, Delta()))

    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(answer(index, request))
    except* Exception as errors:  # noqa: BLE001
        # Whatever it is, somebody waits for it: a server's handler raises errors of its own.
        first: Exception = errors
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        news.put_nowait(first)
    news.put_nowait(None)


def error_response(
    path: str,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    cause: EtudeError | None = None,
) -> Reply:
    """The error object of the API that a path belongs to, with its status."""
    headers = {"x-should-retry": "false"}
    if cause is not None:
        headers[ERROR_HEADER] = type(cause).__name__
    if isinstance(cause, RequestError | ImpossibleCall):
        param = cause.param
    dialect = dialect_of(path)
    error = dialect.error(status, message, param=param, code=code)
    return json_reply(error, status, headers)


def dialect_of(path: str) -> type[Dialect]:
    """The dialect that the errors of a path are written in."""
    path = _plain_path(path)
    return MessagesDialect if path.startswith("/messages") else _DIALECTS.get(path, ChatDialect)


def code_of(error: EtudeError) -> str | None:
    """OpenAI's code for an error, where it has one."""
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    return "invalid_value" if isinstance(error, RequestError | ImpossibleCall) else None


def _status_of(error: EtudeError) -> int:
    if isinstance(error, RequestError | ImpossibleCall):
        return 400
    return 500 if isinstance(error, EngineError) else 409


def _plain_path(path: str) -> str:
    """The path without `/v1`, however often clients put it before."""
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    return path


class RecordingTransport(httpx.AsyncBaseTransport):
    """Hands each request to a handler and gives back the response. No socket is opened."""

    def __init__(self, handler: Handler, memory: AnswerMemory | None = None) -> None:
        self._gateway = Gateway(handler, memory)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of httpx's."""
        body = await request.aread()
        reply = await self._gateway.answer(request.method, request.url.path, request.headers, body)
        return reply.as_httpx()


class BlockingRecordingTransport(httpx.BaseTransport):
    """The same for clients without asyncio: `run` runs a coroutine on the event loop and waits."""

    def __init__(self, handler: Handler, run: RunOnLoop, memory: AnswerMemory | None = None) -> None:
        self._gateway = Gateway(handler, memory)
        self._run = run

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of httpx's."""
        body = request.read()
        reply: Reply = self._run(
            self._gateway.answer(request.method, request.url.path, request.headers, body)
        )
        if isinstance(reply.content, bytes):
            return reply.as_httpx()
        return httpx.Response(reply.status, headers=reply.headers, content=self._pieces(reply.content))

    def _pieces(self, pieces: AsyncIterator[bytes]) -> Iterator[bytes]:
        async def following() -> bytes | None:
            return await anext(pieces, None)

        while (piece := self._run(following())) is not None:
            yield piece


def recording_client(handler: Handler, memory: AnswerMemory | None = None) -> AsyncOpenAI:
    """An `AsyncOpenAI` whose chat completions and responses are made and recorded by `handler`."""
    from openai import AsyncOpenAI

    # Version 3 of the SDK is annotated with httpx2, and takes a client of httpx all the same.
    http_client: Any = httpx.AsyncClient(transport=RecordingTransport(handler, memory))
    return AsyncOpenAI(**_SETTINGS, http_client=http_client)


def blocking_recording_client(handler: Handler, run: RunOnLoop, memory: AnswerMemory | None = None) -> OpenAI:
    """An `OpenAI` client for functions without asyncio; see `recording_client`."""
    from openai import OpenAI

    http_client: Any = httpx.Client(transport=BlockingRecordingTransport(handler, run, memory))
    return OpenAI(**_SETTINGS, http_client=http_client)
