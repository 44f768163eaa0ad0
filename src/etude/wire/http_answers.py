"""Limits to the answers of HTTP servers: their size, counted after expansion, and the time they take."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import httpx

MEGABYTE = 2**20
ACCEPTED = "gzip, deflate"
"""For `accept-encoding`: what can be expanded piece by piece."""

_PIECE = 2**18
"""Bytes that a compressed piece is expanded to at a time."""
_ANY_HEADER = 47
"""For zlib: a window of 2**15 bytes, with the header of gzip or of zlib."""


class AnswerTooLarge(httpx.RequestError):
    """An answer is larger than the limit; the connection is given up."""


class AnswerLimit:
    """How much an answer may have, those that are compressed after their expansion."""

    def __init__(self, megabytes: float, setting: str) -> None:
        """`setting` is the name of the limit in the error."""
        self._most = int(megabytes * MEGABYTE)
        self._too_large = f"the answer is larger than {megabytes:g} MB; {setting} sets the limit"

    async def of(
        self, pieces: AsyncIterator[bytes], headers: Mapping[str, str], request: Callable[[], httpx.Request]
    ) -> AsyncIterator[bytes]:
        """The expanded bytes of an answer; `request` makes what errors are about.

        Raises AnswerTooLarge, and httpx.DecodingError for one that is compressed otherwise than `ACCEPTED`,
        or not as it says.
        """
        length = headers.get("content-length", "")
        if length.isdecimal() and float(length) > self._most:
            raise AnswerTooLarge(self._too_large, request=request())
        size = 0
        expand = _expander(headers.get("content-encoding", ""), request)
        async for chunk in pieces:
            for piece in expand(chunk):
                size += len(piece)
                if size > self._most:
                    raise AnswerTooLarge(self._too_large, request=request())
                yield piece


def limiting_answers(megabytes: float, setting: str) -> Callable[[httpx.Response], Awaitable[None]]:
    """An event hook for the responses of an `httpx.AsyncClient`, which is to send `ACCEPTED`.

    Reading an answer raises as `AnswerLimit.of` does.
    """
    limit = AnswerLimit(megabytes, setting)

    async def limit_answer(response: httpx.Response) -> None:
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        response.stream = _Limited(
            stream, limit.of(aiter(stream), response.headers.copy(), lambda: response.request)
        )
        response.headers.pop("content-encoding", None)

    return limit_answer


class _Limited(httpx.AsyncByteStream):
    """The bytes of a stream within a limit."""

    def __init__(self, stream: httpx.AsyncByteStream, pieces: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def aclose(self) -> None:
        await self._stream.aclose()


def _expander(encoding: str, request: Callable[[], httpx.Request]) -> Callable[[bytes], Iterator[bytes]]:
    encoding = encoding.strip().lower()
    if encoding in ("identity", ""):
        return lambda chunk: iter((chunk,))
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _Expander(request).pieces
    raise httpx.DecodingError(
        f"the answer is compressed as {encoding[:40]!r}, and {ACCEPTED} was accepted", request=request()
    )


class _Expander:
    """Expands gzip and deflate, a bounded piece at a time."""

    def __init__(self, request: Callable[[], httpx.Request]) -> None:
        self._request = request
        self._zlib = zlib.decompressobj(_ANY_HEADER)

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        while chunk:
            try:
                piece = self._zlib.decompress(chunk, _PIECE)
            except zlib.error as error:
                reason = f"the answer cannot be expanded: {error}"
                raise httpx.DecodingError(reason, request=self._request()) from error
            chunk = self._zlib.unconsumed_tail
            if self._zlib.eof:
                chunk = self._zlib.unused_data
                self._zlib = zlib.decompressobj(_ANY_HEADER)  # For the next member.
            if piece:
                yield piece


SLOWEST_BYTES = 32 * 1024
"""A request has a second more for each so many bytes of its body."""


class MalformedAnswer(httpx.RequestError):
    """A good answer by its status, and none to what was asked."""


class WholeAnswers(httpx.AsyncClient):
    """Limits the whole of a request with its answer, where httpx limits the time between two pieces.

    A request may take `seconds`, and one more for each `SLOWEST_BYTES` of its body; then httpx.ReadTimeout
    is raised. `problem_of` says what is wrong with a good answer, which then raises MalformedAnswer.
    """

    def __init__(
        self, *, seconds: float, problem_of: Callable[[httpx.Response], str | None], **options: Any
    ) -> None:
        super().__init__(timeout=seconds, **options)
        self._seconds = seconds
        self._problem_of = problem_of

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """As httpx.AsyncClient.send; answers that are streamed are not looked at."""
        length = int(request.headers.get("content-length", 0))
        try:
            async with asyncio.timeout(self._seconds + length / SLOWEST_BYTES):
                response = await super().send(request, **options)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no whole answer in {self._seconds:g} s", request=request) from error
        if response.is_success and not options.get("stream"):
            problem = self._problem_of(response)
            if problem is not None:
                raise MalformedAnswer(problem, request=request)
        return response
