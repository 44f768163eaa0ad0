"""Child processes that end with their parent, and their masked logs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import sys
import threading
from asyncio.subprocess import Process
from pathlib import Path
from typing import IO, Any

from etude.core.secrets import masked
from etude.store.files import open_private

_EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+")


_GUARDED = """
import os, signal, sys
lifeline = int(sys.argv[1])
if os.fork() == 0:
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
os.wait()
os.close(lifeline)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Starts a guard in its process group, and becomes the command. No other group gets the group's number while
the guard lives. The guard is not the command's child, because a program may wait for all its children."""


async def start_guarded(*command: str, **options: Any) -> tuple[Process, int]:
    """Start a command in its own process group, which is killed once this process is gone, even at its start.

    Returns the process, and a descriptor to close once the group has been killed. Raises OSError if there is
    no such program.
    """
    path = options.get("env", os.environ).get("PATH")
    # A name with a folder is relative to the command's working directory.
    named = Path(options.get("cwd") or "", command[0]) if os.path.dirname(command[0]) else command[0]  # noqa: PTH120
    if shutil.which(named, path=path) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    ours, theirs = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _GUARDED, str(ours), *command),
            pass_fds=[ours],
            start_new_session=True,
            **options,
        )
    except BaseException:
        os.close(theirs)
        raise
    finally:
        os.close(ours)
    return process, theirs


def last_lines(path: Path, count: int = 12) -> str:
    """Return the last `count` non-empty lines in a file's last 4 KiB; empty if it cannot be read."""
    return "\n".join([line for line in read_tail(path, 4096).splitlines() if line.strip()][-count:])


def last_exception(path: Path, start: int = 0) -> str | None:
    """Return the last exception that a log names from byte `start` on, with its text, or None."""
    named = _EXCEPTION.findall(read_tail(path, 2**18, start))
    return named[-1].strip() if named else None


def read_tail(path: Path, most: int, start: int = 0) -> str:
    """Return at most the last `most` bytes of a file, from byte `start` on; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - most))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


_LONGEST_LINE = 2**16
"""Bytes after which an unfinished line is written anyway, because it may have no end."""


class MaskedLog:
    """Appends a child's output to a file. Start the child within the block, with `fileno()` as its output.

    Lines are masked whole. A thread copies them, so that a busy event loop does not hold up the child.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        file = open_private(path, "ab")
        self.path = path
        self.begin = file.tell()
        """Size of the file in bytes before the child's output."""
        reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=_copy, args=(reading, file), name="etude-log", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor that the child writes to."""
        return self._writing

    def __enter__(self) -> MaskedLog:
        return self

    def __exit__(self, *exc: object) -> None:
        """Close this end of the pipe; the thread stops once all other holders have closed theirs."""
        os.close(self._writing)

    async def settled(self) -> None:
        """Wait until the file has all output, for a second at most: other processes may hold the pipe."""
        await asyncio.to_thread(self._thread.join, 1.0)


class MaskedLines:
    """Masks secrets in a stream of bytes, line by line."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, piece: bytes) -> bytes:
        """Add a piece, and return the lines that it completes, masked."""
        data = self._rest + piece
        # Progress bars end their lines with a carriage return.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _LONGEST_LINE:
            end = len(data)
        self._rest = data[end:]
        return _masked(data[:end])

    def end(self) -> bytes:
        """Return the last, unfinished line, masked."""
        data, self._rest = self._rest, b""
        return _masked(data)


def _masked(data: bytes) -> bytes:
    return masked(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _copy(reading: int, file: IO[bytes]) -> None:
    lines = MaskedLines()
    with file, os.fdopen(reading, "rb", buffering=0) as pipe:
        while piece := pipe.read(2**16):
            _write(file, lines.add(piece))
        _write(file, lines.end())


def _write(file: IO[bytes], data: bytes) -> None:
    # A full disk must not stop the child.
    with contextlib.suppress(OSError):
        file.write(data)
        file.flush()


def exit_words(code: int) -> str:
    """Return a process's exit code in words."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
