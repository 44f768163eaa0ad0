"""The sandbox's process: started, fed, watched, and killed with everything it may have started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, RequestError
from etude.sandbox.limits import Limits

_START = "import sys; sys.path.insert(0, sys.argv[1]); from etude.sandbox.inside.main import main; main()"
_OPTIONS = ("-s", "-P", "-S", "-B", "-X", "utf8", "-c", _START)
"""Isolated, but for one variable: `-I` would leave it out, and with it what makes a run repeat."""
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}

_CHUNK = 65536
_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Exit:
    """What came out of the process."""

    reports: bytes
    output: bytes
    code: int | None
    """The exit status; minus the number of the signal that ended it."""
    stopped: str | None
    """Why it was killed from here: `time`, `output` or `folder`."""
    seconds: float


class _Stop(Exception):
    """The process has done what is reason to kill it."""


async def run_process(job: bytes, stdin: bytes, limits: Limits) -> Exit:
    """Start the inside of the sandbox with a job, and wait until it ends or has to be killed.

    Takes `limits.wall_seconds` at most, and a little to clean up. When it is cancelled, the process is
    killed. Raises EtudeError when no process can be started.
    """
    if os.name != "posix":
        raise RequestError("the sandbox needs Linux or macOS")
    started = time.perf_counter()
    reports, output = bytearray(), bytearray()
    stopped = None
    with _own_folder() as folder:
        async with _process(folder) as process:
            assert process.stdin and process.stdout and process.stderr
            try:
                async with asyncio.timeout(limits.wall_seconds):
                    await _all(
                        _feed(process.stdin, b"%12d" % len(job) + job + stdin),
                        _collect(process.stdout, output, limits.output_bytes),
                        _collect(process.stderr, reports, limits.output_bytes),
                        process.wait(),
                        watch=_watch(folder, limits),
                    )
            except TimeoutError:
                stopped = "time"
            except _Stop as reason:
                stopped = str(reason)
    return Exit(bytes(reports), bytes(output), process.returncode, stopped, time.perf_counter() - started)


@contextlib.asynccontextmanager
async def _process(folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    root = Path(__file__).parents[2]
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *_OPTIONS, str(root)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=folder,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
    except OSError as error:
        raise EtudeError(f"the sandbox cannot start {sys.executable!r}: {error}") from error
    try:
        yield process
    finally:
        _kill_group(process.pid)
        # What is left in the pipes is of no interest; open ones would keep the process from being waited for.
        process._transport.close()  # type: ignore[attr-defined]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_SECONDS)


def _kill_group(pid: int) -> None:
    # The group outlives its leader as long as anyone is in it, and is gone otherwise.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _all(*parts: Coroutine[Any, Any, Any], watch: Coroutine[Any, Any, None]) -> None:
    """Wait for the parts; the watch goes on until then. Raises the first `_Stop` of any."""
    watching: asyncio.Future[Any] = asyncio.ensure_future(watch)
    working: asyncio.Future[Any] = asyncio.gather(*parts)
    try:
        done, _ = await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            await one
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    # A program need not read what it is given.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


async def _collect(stream: asyncio.StreamReader, into: bytearray, limit: int) -> None:
    while part := await stream.read(_CHUNK):
        into += part[: limit - len(into)]
        if len(into) >= limit:
            raise _Stop("output")


async def _watch(folder: Path, limits: Limits) -> None:
    """Look at the folder every now and then. Ends only by `_Stop`, or by being cancelled."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if not _fits(folder, limits):
            raise _Stop("folder")


def _fits(folder: Path, limits: Limits) -> bool:
    entries = size = 0
    pending = [folder]
    while pending:
        for entry in _list(pending.pop()):
            entries += 1
            with contextlib.suppress(OSError):
                size += entry.stat(follow_symlinks=False).st_size
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
            if entries > limits.folder_entries or size > limits.folder_bytes:
                return False
    return True


def _list(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # Gone already, or not to be looked into.


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="etude-sandbox-"))
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder, however deep and however unwilling what is in it."""
    pending, number = [folder], 0
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            current.chmod(stat.S_IRWXU)
        for entry in _list(current):
            try:
                Path(entry.path).unlink()
            except OSError:
                # A folder. It is moved up, because one that lies deep has no path short enough.
                number += 1
                moved = folder / f"{secrets.token_hex(8)}-{number}"
                with contextlib.suppress(OSError):
                    Path(entry.path).rename(moved)
                    pending.append(moved)
        if current != folder:
            with contextlib.suppress(OSError):
                current.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()
