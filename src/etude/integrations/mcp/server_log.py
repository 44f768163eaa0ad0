"""The end of what a server writes to its standard error, kept within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from typing import TextIO

_BYTES = 2**16
_LINES = 40
"""Lines that an episode or an error shows, at most."""


class ServerLog:
    """Reads a pipe that a server writes to, on the event loop, and keeps the last of it."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.stream: TextIO = os.fdopen(writing, "w")
        """The server's standard error."""
        self._fd: int | None = reading
        self._ended = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=_LINES * 10)
        self._count = 0
        self._rest = ""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reading, self._read)

    @property
    def position(self) -> int:
        """How many lines there were so far."""
        return self._count

    @property
    def has_ended(self) -> bool:
        """Whether the server, and all that it has started, are gone."""
        return self._ended.is_set()

    def add(self, line: str) -> None:
        """Add a line of another origin: a log message of the protocol, or a breach of it."""
        self._lines.append(line[:1000])
        self._count += 1

    def started(self) -> None:
        """The server has the pipe: its end is seen when the server, and all that it has started, are gone."""
        self.stream.close()

    async def end(self, seconds: float) -> None:
        """Wait for the end of the log, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    def since(self, position: int = 0) -> str:
        """The last lines that came after a position."""
        if self._fd is not None:
            self._read()
        new = min(self._count - position, len(self._lines))
        lines = list(self._lines)[len(self._lines) - new :] if new else []
        if self._rest:
            lines.append(self._rest)
        return "\n".join(lines[-_LINES:])

    def close(self) -> None:
        """Stop reading."""
        self.stream.close()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
        self._ended.set()

    def _read(self) -> None:
        assert self._fd is not None
        try:
            data = os.read(self._fd, _BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        self._rest = self._rest[-1000:]
        for line in lines:
            self.add(line)
