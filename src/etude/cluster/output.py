"""The output of a process on a node, on its way to the head: a bounded part of it, in memory."""

from __future__ import annotations

import asyncio

_MOST_BYTES = 1_000_000
"""That wait for the head; of more, the oldest are dropped."""
_PIECE_BYTES = 64_000
"""Of one answer: a short one goes from process to process, and not into the object store."""
_IDLE_SECONDS = 30.0


class Output(asyncio.Protocol):
    """Reads a pipe, and hands out what came, piece by piece."""

    def __init__(self, most: int = _MOST_BYTES) -> None:
        self._most = most
        self._waiting = bytearray()
        self._dropped = 0
        self._news = asyncio.Event()
        self.is_over = asyncio.Event()
        """Set once nobody can write any more."""

    def data_received(self, data: bytes) -> None:
        """Keep what was written."""
        self._waiting += data
        excess = len(self._waiting) - self._most
        if excess > 0:
            del self._waiting[:excess]
            self._dropped += excess
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the pipe."""
        self.is_over.set()
        self._news.set()

    async def take(self, *, wait: bool) -> bytes:
        """The next piece, with a line about what was dropped before it; with `wait` it may take a while."""
        if wait and not self._waiting:
            self._news.clear()
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                return b""
        piece = bytes(self._waiting[:_PIECE_BYTES])
        del self._waiting[:_PIECE_BYTES]
        if self._dropped:
            note = f"[etude: {self._dropped} bytes of output are missing here: they came too fast]\n"
            self._dropped = 0
            return note.encode() + piece
        return piece
