"""Lanes: one HTTP connection for each request under way."""

from __future__ import annotations

import ssl
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import httpx

    from etude.inference.http_connection import PlainConnection
    from etude.inference.plain_http import HttpAnswer, PostHead

    _Lane: TypeAlias = httpx.AsyncClient | PlainConnection

_KEEPALIVE_SECONDS = 4.0
"""Below the 5 s after which uvicorn, and so vLLM, closes an idle connection: no race on reuse."""
_CONNECT_SECONDS = 15.0
"""For a connection, its TLS handshake included."""


class HttpLanes:
    """Sends requests to servers, each over a connection of its own that is used again afterwards.

    One client of httpx for all would be simpler, but its pool looks at every connection on every request:
    at 64 requests under way that is 4.4 ms of CPU per request, and with a lane for each 0.5 ms. Where there
    is neither TLS nor a proxy nor a password in the address, a lane is no client of httpx's at all.
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

        from etude.inference.plain_http import PostHead
        from etude.wire.answer_size import ACCEPTED, MEGABYTE, limiting_answers

        self._httpx = httpx
        self._headers = httpx.Headers({"accept-encoding": ACCEPTED, **headers})
        self._most = int(most_megabytes * MEGABYTE)
        self._limit = limiting_answers(most_megabytes, setting)
        self._read_seconds = read_seconds
        self._extensions = {"timeout": {"read": read_seconds, "connect": _CONNECT_SECONDS}}
        """Of requests by httpx's clients."""
        self._head: Callable[[str], PostHead] = lru_cache(maxsize=64)(
            lambda url: PostHead(httpx.URL(url), self._headers)
        )
        self._idle: dict[str, list[_Lane]] = defaultdict(list)
        """By scheme, host and port."""
        self._all: list[_Lane] = []
        self._tls: ssl.SSLContext | None = None

    async def post(self, url: str, content: bytes, headers: Mapping[str, str] | None = None) -> HttpAnswer:
        """Send `content`, with more headers, and read the whole answer. No limit to the whole time: the
        caller sets one.

        Raises httpx.RequestError when there is no answer, or one that is too large. Cancelling closes the
        connection.
        """
        address, origin = _parsed(url)
        with self._lane(address, origin) as lane:
            if headers or isinstance(lane, self._httpx.AsyncClient):
                answer = await self._sent(lane, self._request(address, content, headers))
            else:
                whole = await lane.post(self._head(url), content)
                if not isinstance(whole, self._httpx.Response):
                    return whole
                answer = whole
            async with self._within_limits(answer):
                await answer.aread()
                return answer

    async def get(self, url: str) -> HttpAnswer:
        """Like `post`, for what only has to be read."""
        async with self.stream(url, None) as response:
            await response.aread()
            return response

    @asynccontextmanager
    async def stream(self, url: str, content: bytes | None) -> AsyncIterator[httpx.Response]:
        """Like `post`, for an answer that is read piece by piece; without content it is a GET."""
        address, origin = _parsed(url)
        with self._lane(address, origin) as lane:
            answer = await self._sent(lane, self._request(address, content))
            async with self._within_limits(answer):
                yield answer

    async def close(self) -> None:
        """Close all connections. Calling it twice is fine."""
        lanes, self._all = self._all, []
        self._idle.clear()
        for lane in lanes:
            await lane.aclose()

    @contextmanager
    def _lane(self, address: httpx.URL, origin: str) -> Iterator[_Lane]:
        """A lane that is nobody else's within the block."""
        idle = self._idle[origin]
        lane = idle.pop() if idle else self._open(address)
        try:
            yield lane
        finally:
            idle.append(lane)

    def _request(
        self, address: httpx.URL, content: bytes | None, headers: Mapping[str, str] | None = None
    ) -> httpx.Request:
        method = "GET" if content is None else "POST"
        own = {**self._headers, **headers} if headers else self._headers
        return self._httpx.Request(method, address, headers=own, content=content, extensions=self._extensions)

    @asynccontextmanager
    async def _within_limits(self, answer: httpx.Response) -> AsyncIterator[None]:
        try:
            await self._limit(answer)
            yield
        finally:
            await answer.aclose()

    async def _sent(self, lane: _Lane, request: httpx.Request) -> httpx.Response:
        if isinstance(lane, self._httpx.AsyncClient):
            return await lane.send(request, stream=True)
        return await lane.send(request)

    def _open(self, address: httpx.URL) -> _Lane:
        lane = self._plain(address) if _is_plain(address) else self._client(address)
        self._all.append(lane)
        return lane

    def _plain(self, address: httpx.URL) -> PlainConnection:
        from etude.inference.http_connection import PlainConnection

        return PlainConnection(
            address,
            connect_seconds=_CONNECT_SECONDS,
            read_seconds=self._read_seconds,
            idle_seconds=_KEEPALIVE_SECONDS,
            short=self._most,
        )

    def _client(self, address: httpx.URL) -> httpx.AsyncClient:
        if self._tls is None:
            # Reading the certificates takes milliseconds: where they are needed, and the lanes share them.
            is_needed = address.scheme == "https"
            self._tls = (
                self._httpx.create_ssl_context() if is_needed else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            )
        limits = self._httpx.Limits(keepalive_expiry=_KEEPALIVE_SECONDS)
        return self._httpx.AsyncClient(verify=self._tls, timeout=None, limits=limits)


@lru_cache(maxsize=1024)
def _parsed(url: str) -> tuple[httpx.URL, str]:
    """An address, and its scheme, host and port."""
    import httpx

    address = httpx.URL(url)
    return address, f"{address.scheme}://{address.netloc.decode()}"


def _is_plain(address: httpx.URL) -> bool:
    """Whether requests go there without TLS, a password, or a proxy that the environment names."""
    is_simple = address.scheme == "http" and not address.userinfo
    return is_simple and not {"http", "all"} & urllib.request.getproxies().keys()
