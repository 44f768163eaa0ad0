"""Limits on the size and duration of HTTP answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx

USUAL_MEGABYTES = 32.0
"""Size limit of an answer; 16,000 tokens, each with the 20 likeliest ones, take less."""
UNCOMPRESSED = {"accept-encoding": "identity"}
"""Headers for httpx clients with limited answers, because httpx decompresses without a limit."""


class AnswerTooLarge(httpx.RequestError):
    """An answer is larger than the limit; its connection is closed."""


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
