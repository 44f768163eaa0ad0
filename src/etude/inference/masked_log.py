"""The log of a child program, with secrets masked before anything of it is written."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from typing import IO

from etude.core.secrets import masked
from etude.store.files import open_private

_PIECE_BYTES = 2**16
_LONGEST_LINE = 2**16
"""Bytes of a line that is written in parts: it may have no end."""
_REST_SECONDS = 1.0
"""For what a program has printed to get into the file after its end; others may still have the pipe open."""


class MaskedLog:
    """Appends to a file what a child writes, which is started within the block with `fileno()` as its output.

    Lines are masked whole. A thread copies them, so that the child goes on whatever this process does.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be opened."""
        file = open_private(path, "ab")
        self.begin = file.tell()
        """The number of bytes that the file had before."""
        reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=_copy, args=(reading, file), name="etude-log", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """The descriptor that the child writes to."""
        return self._writing

    def __enter__(self) -> MaskedLog:
        return self

    def __exit__(self, *exc: object) -> None:
        """The child has the pipe, if it was started: its end is seen when all that have it are gone."""
        os.close(self._writing)

    async def settled(self) -> None:
        """Wait until all that was printed is in the file; a moment at most."""
        await asyncio.to_thread(self._thread.join, _REST_SECONDS)


class MaskedLines:
    """Masks secrets in what comes in pieces, line by line."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, piece: bytes) -> bytes:
        """The lines that are whole now, masked."""
        data = self._rest + piece
        # A bar of progress ends its lines with a return.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _LONGEST_LINE:
            end = len(data)
        self._rest = data[end:]
        return _masked(data[:end])

    def end(self) -> bytes:
        """A line that nobody has ended, masked."""
        data, self._rest = self._rest, b""
        return _masked(data)


def _masked(data: bytes) -> bytes:
    return masked(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _copy(reading: int, file: IO[bytes]) -> None:
    lines = MaskedLines()
    with file, os.fdopen(reading, "rb", buffering=0) as pipe:
        while piece := pipe.read(_PIECE_BYTES):
            _write(file, lines.add(piece))
        _write(file, lines.end())


def _write(file: IO[bytes], data: bytes) -> None:
    # A disk that takes no more must not keep the child from going on.
    with contextlib.suppress(OSError):
        file.write(data)
        file.flush()
