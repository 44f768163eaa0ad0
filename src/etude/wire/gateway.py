"""The APIs that agents speak, over a callable that makes and records the calls, and clients for them.

The clients are real OpenAI clients whose requests never leave the process.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx
from pydantic_core import from_json

from etude.core.errors import EngineError, EtudeError, ImpossibleCall, RequestError
from etude.wire.chat import ChatDialect
from etude.wire.dialect import AnswerMemory, ChatBody, Dialect, RecordedCompletion, server_sent
from etude.wire.messages import MessagesDialect
from etude.wire.responses import ResponsesDialect

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

Handler: TypeAlias = Callable[[ChatBody], Awaitable[RecordedCompletion]]
"""Makes and records the call that a request asks for. Raises RequestError when the request is wrong,
EngineError when the model has no answer, another EtudeError when no calls may be made any more."""

RunOnLoop: TypeAlias = Callable[[Coroutine[Any, Any, httpx.Response]], httpx.Response]
"""Runs a coroutine on the event loop, and waits for it."""

FUNCTION_HEADER = "x-etude-function"
"""Request header: the function of the agent that makes the call."""

ERROR_HEADER = "x-etude-error"
"""Response header: the class of the error that is behind a status of 400 or more."""

_DIALECTS: Mapping[str, type[Dialect]] = {
    "/chat/completions": ChatDialect,
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

    def __init__(self, handler: Handler, memory: AnswerMemory | None = None) -> None:
        """`memory` is shared by all gateways of an episode."""
        self._handler = handler
        memory = memory or AnswerMemory()
        self._dialects = {path: dialect(memory) for path, dialect in _DIALECTS.items()}

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> httpx.Response:
        """Answer one HTTP request.

        All errors come back as the API's error object, and tell its client not to retry: what could be
        retried has been retried by the engine.
        """
        path = _plain_path(path)
        dialect = self._dialects.get(path)
        if dialect is None or method != "POST":
            message = f"{method} {path} is not recorded; recorded are POST {', '.join(_DIALECTS)}"
            return error_response(path, 404, message, code="not_found")
        try:
            data = from_json(body)
        except ValueError as error:
            return error_response(path, 400, f"the request is not JSON: {error}")
        try:
            asked = dialect.parse(data)
            recorded = await self._handler(replace(asked, function=headers.get(FUNCTION_HEADER)))
        except EtudeError as error:
            return error_response(path, _status_of(error), str(error), cause=error)
        reply = dialect.reply(recorded, asked, data, int(time.time()))
        if not asked.stream:
            return httpx.Response(200, json=reply)
        events = b"".join(server_sent(data, name) for name, data in dialect.events(reply, asked))
        return httpx.Response(200, content=events, headers={"content-type": "text/event-stream"})


def error_response(
    path: str, status: int, message: str, *, code: str | None = None, cause: EtudeError | None = None
) -> httpx.Response:
    """The error object of the API that a path belongs to, with its status."""
    headers = {"x-should-retry": "false"}
    if cause is not None:
        headers[ERROR_HEADER] = type(cause).__name__
    param = cause.param if isinstance(cause, RequestError) else None
    dialect = _DIALECTS.get(_plain_path(path), ChatDialect)
    error = dialect.error(status, message, param=param, code=code)
    return httpx.Response(status, json=error, headers=headers)


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
        return await self._gateway.answer(request.method, request.url.path, request.headers, body)


class BlockingRecordingTransport(httpx.BaseTransport):
    """The same for clients without asyncio: `run` runs a coroutine on the event loop and waits."""

    def __init__(self, handler: Handler, run: RunOnLoop, memory: AnswerMemory | None = None) -> None:
        self._gateway = Gateway(handler, memory)
        self._run = run

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of httpx's."""
        body = request.read()
        return self._run(self._gateway.answer(request.method, request.url.path, request.headers, body))


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
