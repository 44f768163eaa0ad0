"""Real OpenAI clients whose requests never leave the process: each becomes a recorded call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx

from etude.wire.gateway import Gateway, Handler, WireResponse
from etude.wire.said import Said

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

RunOnLoop: TypeAlias = Callable[[Coroutine[Any, Any, WireResponse]], WireResponse]

_BASE_URL = "http://recorded.invalid/v1"
_API_KEY = "recorded"


class RecordingTransport(httpx.AsyncBaseTransport):
    """Hands each request to a handler and gives back the response. No socket is opened."""

    def __init__(self, handler: Handler, said: Said | None = None) -> None:
        self._gateway = Gateway(handler, said)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        body = await request.aread()
        response = await self._gateway.answer(request.method, request.url.path, request.headers, body)
        return _to_httpx(response)


class BlockingRecordingTransport(httpx.BaseTransport):
    """The same for clients without asyncio: `run` runs a coroutine on the event loop and waits."""

    def __init__(self, handler: Handler, run: RunOnLoop, said: Said | None = None) -> None:
        self._gateway = Gateway(handler, said)
        self._run = run

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        body = request.read()
        response = self._run(self._gateway.answer(request.method, request.url.path, request.headers, body))
        return _to_httpx(response)


def recording_client(handler: Handler, said: Said | None = None) -> AsyncOpenAI:
    """An `AsyncOpenAI` whose chat completions and responses are made and recorded by `handler`.

    It does not retry and has no timeout of its own: the engine behind the handler retries, and the
    episode's timeout ends it.
    """
    from openai import AsyncOpenAI

    # Version 3 of the SDK is annotated with httpx2, and takes a client of httpx all the same.
    http_client: Any = httpx.AsyncClient(transport=RecordingTransport(handler, said))
    return AsyncOpenAI(
        api_key=_API_KEY,
        base_url=_BASE_URL,
        max_retries=0,
        timeout=None,
        http_client=http_client,
    )


def blocking_recording_client(handler: Handler, run: RunOnLoop, said: Said | None = None) -> OpenAI:
    """An `OpenAI` client for functions without asyncio; see `recording_client`."""
    from openai import OpenAI

    http_client: Any = httpx.Client(transport=BlockingRecordingTransport(handler, run, said))
    return OpenAI(
        api_key=_API_KEY,
        base_url=_BASE_URL,
        max_retries=0,
        timeout=None,
        http_client=http_client,
    )


def _to_httpx(response: WireResponse) -> httpx.Response:
    return httpx.Response(response.status, headers=dict(response.headers), content=response.body)
