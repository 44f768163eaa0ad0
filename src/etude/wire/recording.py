"""Real OpenAI clients whose requests never leave the process: each becomes a recorded call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx

from etude.wire.dialect import AnswerMemory
from etude.wire.gateway import Gateway, Handler

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

RunOnLoop: TypeAlias = Callable[[Coroutine[Any, Any, httpx.Response]], httpx.Response]

_SETTINGS: dict[str, Any] = {
    "api_key": "recorded",
    "base_url": "http://recorded.invalid/v1",
    "max_retries": 0,
    "timeout": None,
}
"""The engine behind the handler retries, and the episode's timeout ends a request."""


class RecordingTransport(httpx.AsyncBaseTransport):
    """Hands each request to a handler and gives back the response. No socket is opened."""

    def __init__(self, handler: Handler, memory: AnswerMemory | None = None) -> None:
        self._gateway = Gateway(handler, memory)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of httpx's."""
        return await _answer(self._gateway, request, await request.aread())


class BlockingRecordingTransport(httpx.BaseTransport):
    """The same for clients without asyncio: `run` runs a coroutine on the event loop and waits."""

    def __init__(self, handler: Handler, run: RunOnLoop, memory: AnswerMemory | None = None) -> None:
        self._gateway = Gateway(handler, memory)
        self._run = run

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of httpx's."""
        return self._run(_answer(self._gateway, request, request.read()))


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


async def _answer(gateway: Gateway, request: httpx.Request, body: bytes) -> httpx.Response:
    response = await gateway.answer(request.method, request.url.path, request.headers, body)
    return httpx.Response(response.status, headers=dict(response.headers), content=response.body)
