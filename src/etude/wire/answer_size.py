"""A limit to the size of answers, those that are sent compressed counted after their expansion."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

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


def limiting_answers(megabytes: float, setting: str) -> Callable[[httpx.Response], Awaitable[None]]:
    """An event hook for the responses of an `httpx.AsyncClient`, which is to send `ACCEPTED`.

    Reading an answer of more than `megabytes` raises AnswerTooLarge, which names the `setting`; one that is
    compressed otherwise, or not as it says, raises httpx.DecodingError.
    """
    most = int(megabytes * MEGABYTE)
    limit = f"the answer is larger than {megabytes:g} MB; {setting} sets the limit"

    async def limit_answer(response: httpx.Response) -> None:
        encoding = response.headers.pop("content-encoding", "identity").strip().lower()
        if not hasattr(response, "_content"):
            stream = response.stream
            assert isinstance(stream, httpx.AsyncByteStream)
            response.stream = _Limited(stream, encoding, most, limit, response.request)
        length = response.headers.get("content-length", "")
        if length.isdecimal() and float(length) > most:
            raise AnswerTooLarge(limit, request=response.request)

    return limit_answer


class _Limited(httpx.AsyncByteStream):
    """The expanded bytes of a stream, up to a limit."""

    def __init__(
        self, stream: httpx.AsyncByteStream, encoding: str, most: int, limit: str, request: httpx.Request
    ) -> None:
        self._stream = stream
        self._encoding = encoding
        self._most = most
        self._limit = limit
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        expand = self._expander()
        async for chunk in self._stream:
            for piece in expand(chunk):
                size += len(piece)
                if size > self._most:
                    raise AnswerTooLarge(self._limit, request=self._request)
                yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _expander(self) -> Callable[[bytes], Iterator[bytes]]:
        if self._encoding in ("identity", ""):
            return lambda chunk: iter((chunk,))
        if self._encoding in ("gzip", "x-gzip", "deflate"):
            return _Expander(self._request).pieces
        raise httpx.DecodingError(
            f"the answer is compressed as {self._encoding[:40]!r}, and {ACCEPTED} was accepted",
            request=self._request,
        )


class _Expander:
    """Expands gzip and deflate, a bounded piece at a time."""

    def __init__(self, request: httpx.Request) -> None:
        self._request = request
        self._zlib = zlib.decompressobj(_ANY_HEADER)

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        while chunk:
            try:
                piece = self._zlib.decompress(chunk, _PIECE)
            except zlib.error as error:
                reason = f"the answer cannot be expanded: {error}"
                raise httpx.DecodingError(reason, request=self._request) from error
            chunk = self._zlib.unconsumed_tail
            if self._zlib.eof:
                chunk = self._zlib.unused_data
                self._zlib = zlib.decompressobj(_ANY_HEADER)  # For the next member.
            if piece:
                yield piece
