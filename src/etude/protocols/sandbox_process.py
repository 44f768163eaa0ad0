"""The sandbox's process in a private folder: started, fed, watched, and killed with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import secrets
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

from etude.core.errors import EtudeError, MissingExtraError, RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one run of a program. Raises RequestError for a limit that allows nothing.

    Other processes, sockets, and files outside the run's own folder are always forbidden.
    """

    wall_seconds: float = 10.0
    """From start to end, including the interpreter's start."""
    cpu_seconds: int = 8
    memory_bytes: int = 512 * 1024**2
    """Address space."""
    output_bytes: int = 1024**2
    """Standard output, and as much again for returned values."""
    file_bytes: int = 1024**2
    """One file in the run's own folder, and standard output."""
    folder_bytes: int = 16 * 1024**2
    """All files together. Checked frequently, not at every write, and at the end."""
    folder_entries: int = 256
    """Files and folders together."""
    open_files: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise RequestError(f"{name} must be more than 0, found {getattr(self, name)}")


def fits(folder: Path, limits: Limits, removed: Iterable[os.stat_result] = ()) -> bool:
    """Return whether the folder's content, and open files that were `removed`, are within the limits.

    A file with several names counts its bytes once. Stops at the first excess. An unreadable folder does not
    fit.
    """
    entries = size = 0
    seen = set[int]()
    try:
        for facts in chain(_entries(folder), removed):
            entries += 1
            size += 0 if facts.st_ino in seen else facts.st_size
            seen.add(facts.st_ino)
            if entries > limits.folder_entries or size > limits.folder_bytes:
                return False
    except OSError:
        return False
    return True


_GONE = (FileNotFoundError, NotADirectoryError)


def _entries(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of each file and folder in a folder. Raises OSError for unreadable ones."""
    pending = [folder]
    while pending:
        with contextlib.suppress(*_GONE), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(*_GONE):
                    yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))


def _unnamed_files(pid: int) -> Iterator[os.stat_result]:
    """Yield the status of a process's open files without a name, if /proc shows them."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
        for descriptor in descriptors:
            with contextlib.suppress(*_GONE):
                facts = descriptor.stat()
                if stat.S_ISREG(facts.st_mode) and not facts.st_nlink:
                    yield facts


def remove_tree(folder: Path) -> None:
    """Remove a folder with all its content, even if it is deep or write-protected."""
    pending, number = [folder], 0
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            current.chmod(stat.S_IRWXU)
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(current) as found:
            entries = list(found)  # Unless it is gone already, or unreadable.
        for entry in entries:
            try:
                Path(entry.path).unlink()
            except OSError:
                # A folder. It is moved up, because the path of a deep folder can be too long.
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


_START = "import sys; sys.path[:0] = sys.argv[1:]; from etude.protocols.confinement import main; main()"
_OPTIONS = ("-s", "-P", "-S", "-B", "-X", "utf8", "-c", _START)
"""Isolated except for one variable. `-I` would ignore it, and runs would not repeat exactly."""
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}

_CHUNK = 65536
_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Exit:
    """The process's output and its end."""

    reports: bytes
    output: bytes
    code: int | None
    """The exit status, or minus the number of the signal that ended it."""
    stopped: str | None
    """The limit that it exceeded, `time`, `output` or `folder`, or `cancelled`."""
    seconds: float


async def run_process(job: bytes, stdin: bytes, limits: Limits) -> Exit:
    """Start the inside of the sandbox with a job, and wait until it ends or is killed.

    Takes at most `limits.wall_seconds` and a little to clean up. As many processes run at a time as there are
    processors, so that none uses up another's time; the others wait. Cancelling this kills the process.
    Raises EtudeError if no process can be started.
    """
    # Not asyncio's own processes: a task that is cancelled while it starts one may never end.
    cancelled = threading.Event()
    running = _threads().submit(_run, job, stdin, limits, cancelled)
    result = asyncio.wrap_future(running)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        cancelled.set()
        if not running.cancel():
            await asyncio.wait([result], timeout=_GRACE_SECONDS)
        raise


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # Threads live as long as the program: a process is set to die with the thread that started it.
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="sandbox")


def _run(job: bytes, stdin: bytes, limits: Limits, cancelled: threading.Event) -> Exit:
    root = Path(tempfile.mkdtemp(prefix="etude-sandbox-"))
    folder, given, output = root / "work", root / "in", root / "out"
    try:
        folder.mkdir()
        given.write_bytes(b"%12d" % len(job) + job + stdin)
        output.touch()
        started = time.monotonic()
        with given.open("rb") as read, output.open("ab") as write, _process(folder, read, write) as process:
            reports = bytearray()
            stopped = _collect_reports(process, folder, output, reports, limits, cancelled)
        seconds = time.monotonic() - started
        with output.open("rb") as file:
            written = file.read(limits.output_bytes)
    finally:
        remove_tree(root)
    return Exit(bytes(reports), written, process.returncode, stopped, seconds)


@functools.cache
def _modules() -> tuple[str, ...]:
    """Return the folders of the inside's imports. Raises RequestError if they are missing."""
    if sys.platform != "linux":
        raise RequestError("the sandbox needs Linux: run Etude in a container, or check programs elsewhere")
    found = [importlib.util.find_spec(name) for name in ("pyseccomp", "landlock")]
    if None in found:
        raise MissingExtraError("running untrusted programs", "sandbox")
    origins = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
    folders = [each.parent if each.name != "__init__.py" else each.parents[1] for each in origins]
    return tuple(dict.fromkeys(map(str, (Path(__file__).parents[2], *folders))))


@contextlib.contextmanager
def _process(folder: Path, given: IO[bytes], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            (sys.executable, *_OPTIONS, *_modules()),
            stdin=given,
            stdout=output,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
    except OSError as error:
        raise EtudeError(f"the sandbox cannot start {sys.executable!r}: {error}") from error
    try:
        yield process
    finally:
        # The group outlives its leader while it has any process, and is gone otherwise.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stderr is not None
        process.stderr.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def _collect_reports(
    process: subprocess.Popen[bytes],
    folder: Path,
    output: Path,
    reports: bytearray,
    limits: Limits,
    cancelled: threading.Event,
) -> str | None:
    """Collect a process's reports until it ends. Returns the limit that it must be killed for, or None."""
    assert process.stderr is not None
    pipe, poll = process.stderr.fileno(), select.poll()
    poll.register(pipe, select.POLLIN)
    deadline, look, is_open = time.monotonic() + limits.wall_seconds, 0.0, True
    while True:
        now = time.monotonic()
        if now >= deadline:
            return "time"
        if cancelled.is_set():
            return "cancelled"
        wait = min(_LOOK_SECONDS, deadline - now)
        if is_open:
            if poll.poll(wait * 1000):
                part = os.read(pipe, _CHUNK)
                reports += part
                is_open = bool(part)
        else:  # It is ending, or it has closed the pipe to continue silently.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
        is_over = process.returncode is not None
        if len(reports) > limits.output_bytes or output.stat().st_size > limits.output_bytes:
            return "output"
        if is_over or now >= look:
            look = now + _LOOK_SECONDS
            if not fits(folder, limits, () if is_over else _unnamed_files(process.pid)):
                return "folder"
        if is_over:
            return None
