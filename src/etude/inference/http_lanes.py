"""Lanes: one HTTP connection for each request under way."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

_KEEPALIVE_SECONDS = 4.0
"""Below the 5 s after which uvicorn, and so vLLM, closes an idle connection: no race on reuse."""
_CONNECT_SECONDS = 15.0
"""For a connection, its TLS handshake included."""


class HttpLanes:
    """Sends requests to one server, each over a client of its own that is used again afterwards.

    One client for all would be simpler, but its pool looks at every connection on every request:
    at 64 requests under way that is 4.4 ms of CPU per request, and with a lane for each 0.5 ms.
    Holds as many lanes as there ever were requests at once.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        read_seconds: float | None = None,
        most_megabytes: float,
        setting: str,
    ) -> None:
        """`read_seconds` limits the wait for each piece of an answer. An answer may have `most_megabytes`, of
        which `setting` is the name in the error."""
        # Here and not above: a command that samples nothing should not wait for the import.
        import httpx

        from etude.wire.answer_size import ACCEPTED, limiting_answers

        self._httpx = httpx
        self._headers = httpx.Headers({"accept-encoding": ACCEPTED, **headers})
        self._hooks = {"response": [limiting_answers(most_megabytes, setting)]}
        self._limits = {"timeout": {"read": read_seconds, "connect": _CONNECT_SECONDS}}
        self._idle: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []
        self._tls: ssl.SSLContext | None = None

    async def post(
        self, url: str, content: bytes, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Send `content`, with more headers, and read the whole answer. No limit to the whole time: the
        caller sets one.

        Raises httpx.RequestError when there is no answer, or one that is too large. Cancelling closes the
        connection.
        """
        async with self.stream(url, content, headers) as response:
            await response.aread()
            return response

    async def get(self, url: str) -> httpx.Response:
        """Like `post`, for what only has to be read."""
        async with self.stream(url, None) as response:
            await response.aread()
            return response

    @asynccontextmanager
    async def stream(
        self, url: str, content: bytes | None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Like `post`, for an answer that is read piece by piece; without content it is a GET."""
        client = self._idle.pop() if self._idle else self._open(url)
        method = "GET" if content is None else "POST"
        own = {**self._headers, **headers} if headers else self._headers
        request = self._httpx.Request(method, url, headers=own, content=content, extensions=self._limits)
        try:
            response = await client.send(request, stream=True)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            self._idle.append(client)

    async def close(self) -> None:
        """Close all connections. Calling it twice is fine."""
        lanes, self._all, self._idle = self._all, [], []
        for client in lanes:
            await client.aclose()

    def _open(self, url: str) -> httpx.AsyncClient:
        if self._tls is None:
            # Reading the certificates takes milliseconds: where they are needed, and the lanes share them.
            is_needed = url.startswith("https:")
            self._tls = (
                self._httpx.create_ssl_context() if is_needed else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            )
        limits = self._httpx.Limits(keepalive_expiry=_KEEPALIVE_SECONDS)
        client = self._httpx.AsyncClient(
            verify=self._tls, timeout=None, limits=limits, event_hooks=self._hooks
        )
        self._all.append(client)
        return self._all[-1]
