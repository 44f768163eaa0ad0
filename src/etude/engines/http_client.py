"""The HTTP client of engines that sample elsewhere, and limits for all clients.

Import this module only to use a client: other commands should not wait for aiohttp.
"""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cache, lru_cache, partial
from typing import Any

import aiohttp
import httpx
from yarl import URL

from etude.wire.retries import Refusal, Retryable, describe, to_failure

_KEEPALIVE_SECONDS = 4.0
"""uvicorn, and so vLLM, closes idle connections after 5 s. Closing them earlier avoids a race on reuse."""
_FAILURES: tuple[tuple[type[Exception], type[httpx.RequestError]], ...] = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
    (TimeoutError, httpx.ReadTimeout),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (ValueError, httpx.LocalProtocolError),
    (OSError, httpx.ReadError),
    (aiohttp.ClientError, httpx.RemoteProtocolError),
)
_CONNECT_SECONDS = 15.0
"""Seconds for making a connection, including its TLS handshake."""


USUAL_MEGABYTES = 32.0
"""Size limit of an answer; 16,000 tokens, each with the 20 likeliest ones, take less."""
UNCOMPRESSED = {"accept-encoding": "identity"}
"""Headers for httpx clients with limited answers, because httpx decompresses without a limit."""


class AnswerTooLarge(httpx.RequestError):
    """An answer is larger than the limit; its connection is closed."""


class HttpClient:
    """Sends requests over pooled connections; each connection serves one request at a time."""

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        read_seconds: float | None = None,
        megabytes: float = USUAL_MEGABYTES,
    ) -> None:
        """`read_seconds` limits the wait for each piece of an answer, and `megabytes` the answer's size."""
        self._headers = {"accept-encoding": "gzip, deflate", "content-type": "application/json", **headers}
        self._read_seconds = read_seconds
        self._megabytes = megabytes
        self._session: aiohttp.ClientSession | None = None
        self._route = lru_cache(maxsize=64)(_route)
        # Reading the certificates takes milliseconds.
        self._certificates = cache(httpx.create_ssl_context)

    async def close(self) -> None:
        """Close all connections. Calling it twice is fine."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def stream_post(
        self, url: str, content: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, AsyncIterator[bytes]]]:
        """POST a request with additional `headers`; yield the head of its answer, and the body in pieces.

        The body is decompressed. There is no limit on the total time: the caller sets one. Raises
        httpx.RequestError if there is no answer, or it is too large. Cancelling closes the connection.
        """
        asked = partial(httpx.Request, "POST", url)
        with _as_httpx(asked):
            address, proxy = self._route(url)
            tls = self._certificates() if address.scheme == "https" else True
            if self._session is None:
                seconds = aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_SECONDS, sock_read=self._read_seconds
                )
                self._session = aiohttp.ClientSession(
                    headers=self._headers,
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                    timeout=seconds,
                    cookie_jar=aiohttp.DummyCookieJar(),
                )
            response = await self._session.post(
                address, data=content, headers=headers, proxy=proxy, ssl=tls, allow_redirects=False
            )
        pieces = limit_stream(_read_pieces(response, asked), response.headers, asked, self._megabytes)
        try:
            yield response, pieces
        finally:
            response.close()  # This closes the connection too, if the answer was not read to its end.

    async def post(self, url: str, content: bytes, headers: Mapping[str, str], seconds: float) -> bytes:
        """Send a POST request, and return the body of a good answer, which may take this many `seconds`.

        Raises Retryable or Refusal.
        """
        try:
            # The timeout also ends calls whose endpoint trickles bytes.
            asked = self.stream_post(url, content, headers)
            async with asyncio.timeout(seconds), asked as (response, pieces):
                body = b"".join([piece async for piece in pieces])
        except TimeoutError:
            late = f"no answer within {seconds:g} s; `request_timeout` sets the limit"
            raise Retryable(late, cause="timeout") from None
        except httpx.LocalProtocolError as error:
            raise Refusal(f"the request cannot be sent: {error}") from error
        except AnswerTooLarge as error:
            raise Retryable(str(error), cause="too_large") from error
        except httpx.RequestError as error:
            raise Retryable(describe(error), cause="connection") from error
        if response.status == 200:
            return body
        raise to_failure(response.status, response.headers, body)


def _route(url: str) -> tuple[URL, str | None]:
    """Return an address, and the proxy that the environment sets for it."""
    address, proxies = URL(url, encoded=True), urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    return address, None if proxy is None or urllib.request.proxy_bypass(address.host or "") else proxy


async def _read_pieces(
    response: aiohttp.ClientResponse, asked: Callable[[], httpx.Request]
) -> AsyncIterator[bytes]:
    with _as_httpx(asked):
        async for piece in response.content.iter_any():
            yield piece


@contextmanager
def _as_httpx(asked: Callable[[], httpx.Request]) -> Iterator[None]:
    """Raise aiohttp's errors as httpx's, which all other clients here raise."""
    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        kind = next(theirs for ours, theirs in _FAILURES if isinstance(error, ours))
        raise kind(str(error), request=asked()) from error


async def limit_stream(
    pieces: AsyncIterator[bytes],
    headers: Mapping[str, str],
    request: Callable[[], httpx.Request],
    megabytes: float = USUAL_MEGABYTES,
) -> AsyncIterator[bytes]:
    """Yield the bytes of an answer. Raises AnswerTooLarge; `request` creates the request for that error."""
    length, most = headers.get("content-length", ""), megabytes * 2**20
    size = int(length[:20]) if length.isdecimal() else 0
    if size <= most:
        size = 0
        async for piece in pieces:
            size += len(piece)
            if size > most:
                break
            yield piece
    if size > most:
        reason = f"the answer is larger than {megabytes:g} MB, which Etude does not accept"
        raise AnswerTooLarge(reason, request=request())


async def limit_answer(response: httpx.Response) -> None:
    """Limit the size of a response: an event hook of an `httpx.AsyncClient` that requests `UNCOMPRESSED`.

    Reading the answer raises errors as `limit_stream` does. Raises httpx.DecodingError if it is compressed.
    """
    stream, encoding = response.stream, response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        reason = f"the answer is compressed as {encoding[:40]!r}, but was requested uncompressed"
        raise httpx.DecodingError(reason, request=response.request)
    assert isinstance(stream, httpx.AsyncByteStream)
    pieces = limit_stream(aiter(stream), response.headers, lambda: response.request)
    response.stream = _Limited(stream, pieces)


class _Limited(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, pieces: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def aclose(self) -> None:
        await self._stream.aclose()


SLOWEST_BYTES = 32 * 1024
"""Each request gets one more second for this many bytes of its body."""


class WholeAnswers(httpx.AsyncClient):
    """An httpx client that limits the total time of a request; httpx limits the time between two pieces.

    A request may take `seconds`, plus one for each `SLOWEST_BYTES` of its body, before httpx.ReadTimeout.
    `find_problem` returns the fault of a successful answer, if any, which then raises httpx.DecodingError.
    """

    def __init__(
        self, *, seconds: float, find_problem: Callable[[httpx.Response], str | None], **options: Any
    ) -> None:
        super().__init__(timeout=seconds, **options)
        self._seconds = seconds
        self._find_problem = find_problem

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send a request as httpx.AsyncClient.send does; streamed answers are not checked."""
        length = int(request.headers.get("content-length", 0))
        try:
            async with asyncio.timeout(self._seconds + length / SLOWEST_BYTES):
                response = await super().send(request, **options)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete answer in {self._seconds:g} s", request=request) from error
        is_checked = response.is_success and not options.get("stream")
        if is_checked and (problem := self._find_problem(response)) is not None:
            raise httpx.DecodingError(problem, request=request)
        return response
