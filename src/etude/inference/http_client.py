"""An HTTP client for many requests at once: aiohttp's, with a limit to answers, and with the errors of httpx.

Where many requests are under way a request takes 0.07 ms of CPU by aiohttp, and by httpx's own client 3.5.
"""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp
    import httpx
    from yarl import URL

_KEEPALIVE_SECONDS = 4.0
"""Below the 5 s after which uvicorn, and so vLLM, closes an idle connection: no race on reuse."""
_CONNECT_SECONDS = 15.0
"""For a connection, its TLS handshake included."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer."""

    status_code: int
    headers: Mapping[str, str]
    """To be asked by names in any case."""
    content: bytes
    """The body, expanded where it was sent compressed."""


class HttpClient:
    """Sends requests, each over a connection that no other request has meanwhile."""

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
        # Here and in the methods, not above: a command that samples nothing should not wait for the imports.
        from etude.wire.http_answers import AnswerLimit

        self._headers = {"accept-encoding": "gzip, deflate", **headers}
        self._read_seconds = read_seconds
        self._limit = AnswerLimit(most_megabytes, setting)
        self._session: aiohttp.ClientSession | None = None
        self._route = lru_cache(maxsize=64)(_route)
        # To read them takes milliseconds.
        self._certificates = cache(_certificates)

    async def post(self, url: str, content: bytes, headers: Mapping[str, str] | None = None) -> HttpAnswer:
        """Send `content`, with more headers, and read the whole answer. No limit to the whole time: the
        caller sets one.

        Raises httpx.RequestError when there is no answer, or one that is too large. Cancelling closes the
        connection.
        """
        async with self._asked("POST", url, content, headers) as (response, pieces):
            return HttpAnswer(response.status, response.headers, b"".join([piece async for piece in pieces]))

    async def get(self, url: str) -> HttpAnswer:
        """Like `post`, for what only has to be read."""
        async with self._asked("GET", url, None) as (response, pieces):
            return HttpAnswer(response.status, response.headers, b"".join([piece async for piece in pieces]))

    @asynccontextmanager
    async def stream(self, url: str, content: bytes) -> AsyncIterator[httpx.Response]:
        """Like `post`, for an answer that is read piece by piece."""
        import httpx

        class Body(httpx.AsyncByteStream):
            def __aiter__(self) -> AsyncIterator[bytes]:
                return pieces

        async with self._asked("POST", url, content) as (response, pieces):
            yield httpx.Response(response.status, stream=Body(), request=httpx.Request("POST", url))

    async def close(self) -> None:
        """Close all connections. Calling it twice is fine."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def _asked(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, AsyncIterator[bytes]]]:
        """An answer whose head has come, and its body."""
        import aiohttp

        own = {**self._headers, **headers} if headers else self._headers
        asked = partial(_request, method, url)
        with _as_httpx(asked):
            try:
                response = await self._sent(method, url, content, own)
            except aiohttp.ClientOSError as error:
                # The server closed an idle connection: the request was not written.
                if not isinstance(error.__cause__, aiohttp.ClientConnectionResetError):
                    raise
                response = await self._sent(method, url, content, own)
        try:
            yield response, self._limit.of(_pieces(response, asked), response.headers, asked)
        finally:
            response.close()  # The connection too, where the answer was not read to its end.

    async def _sent(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        address, proxy = self._route(url)
        tls = self._certificates() if address.scheme == "https" else True
        return await self._opened().request(
            method, address, data=content, headers=headers, proxy=proxy, ssl=tls, allow_redirects=False
        )

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            seconds = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=self._read_seconds
            )
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                timeout=seconds,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _route(url: str) -> tuple[URL, str | None]:
    """An address, and the proxy that the environment names for it."""
    from yarl import URL

    address, proxies = URL(url, encoded=True), urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    return address, None if proxy is None or urllib.request.proxy_bypass(address.host or "") else proxy


def _certificates() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()


async def _pieces(
    response: aiohttp.ClientResponse, asked: Callable[[], httpx.Request]
) -> AsyncIterator[bytes]:
    with _as_httpx(asked):
        async for piece in response.content.iter_any():
            yield piece


@contextmanager
def _as_httpx(asked: Callable[[], httpx.Request]) -> Iterator[None]:
    """aiohttp's errors as httpx's, which all other clients here raise."""
    import aiohttp
    import httpx

    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout("", request=asked()) from error
    except TimeoutError as error:
        raise httpx.ReadTimeout("", request=asked()) from error
    except aiohttp.ClientConnectorError as error:
        is_tls = isinstance(error.os_error, ssl.SSLError)
        words = str(error.os_error) if is_tls else "All connection attempts failed"
        raise httpx.ConnectError(words, request=asked()) from error
    except (aiohttp.InvalidURL, ValueError) as error:
        raise httpx.LocalProtocolError(str(error), request=asked()) from error
    except aiohttp.ServerDisconnectedError as error:
        words = "Server disconnected without sending a response."
        raise httpx.RemoteProtocolError(words, request=asked()) from error
    except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError) as error:
        raise httpx.RemoteProtocolError(str(error), request=asked()) from error
    except (aiohttp.ClientError, OSError) as error:
        raise httpx.ReadError(str(error), request=asked()) from error


def _request(method: str, url: str) -> httpx.Request:
    import httpx

    return httpx.Request(method, url)
