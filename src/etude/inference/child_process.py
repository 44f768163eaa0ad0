"""Child processes: how they end with their parent, their masked logs, and what starts a team of them."""

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
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

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
"""Becomes the command, with a guard in its process group, whose number is nobody else's for as long as the
guard lives. The guard is nobody's child, because a program may wait for all of its own."""


async def start_guarded(*command: str, **options: Any) -> tuple[Process, int]:
    """A command in a process group of its own, which is killed as soon as this process is no more, from its
    first instant on; and the descriptor to close once the group has been killed.

    Raises OSError when there is no such program.
    """
    path = options.get("env", os.environ).get("PATH")
    # One that is named with its folder is looked for from where it is to run.
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
    """The last lines of a file of any size; nothing of one that cannot be read."""
    return "\n".join([line for line in end_of(path, 4096).splitlines() if line.strip()][-count:])


def last_exception(path: Path, start: int = 0) -> str | None:
    """The last exception that a log names from the byte `start` on, with its text."""
    named = _EXCEPTION.findall(end_of(path, 2**18, start))
    return named[-1].strip() if named else None


def end_of(path: Path, most: int, start: int = 0) -> str:
    """At most so many last bytes of a file, from the byte `start` on; nothing of one that cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - most))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


_LONGEST_LINE = 2**16
"""Bytes of a line that is written in parts: it may have no end."""


class MaskedLog:
    """Appends to a file what a child writes, which is started within the block with `fileno()` as its output.

    Lines are masked whole. A thread copies them, so that the child goes on whatever this process does.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be opened."""
        file = open_private(path, "ab")
        self.path = path
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
        """Wait until all that was printed is in the file; a second at most: others may have the pipe."""
        await asyncio.to_thread(self._thread.join, 1.0)


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
        while piece := pipe.read(2**16):
            _write(file, lines.add(piece))
        _write(file, lines.end())


def _write(file: IO[bytes], data: bytes) -> None:
    # A disk that takes no more must not keep the child from going on.
    with contextlib.suppress(OSError):
        file.write(data)
        file.flush()


_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)
"""In the words of torch's launcher."""


class TeamLauncher(Protocol):
    """A way to start the processes of a team: a command that lives for as long as they do.

    Whoever runs the command watches and ends it as any process. It exits with 0 once all processes have done
    their part, SIGTERM asks them to make way, and their output is its own. Those that outlive it on this
    machine hold locks of their job.
    """

    def command(self, module: str, arguments: Sequence[str], processes: int, folder: Path) -> list[str]:
        """The command that runs a Python module in several processes at once, which are to be `joined`.

        `folder` is the job's, and may be written to.
        """

    def first_failure(self, log: str) -> str | None:
        """Which process ended first and how, by the output of the command; None where it does not say."""


class LocalTeams:
    """Processes on this machine, started by `accelerate launch`."""

    def command(self, module: str, arguments: Sequence[str], processes: int, folder: Path) -> list[str]:
        """`accelerate launch` is given all that a config file of the user's would otherwise decide.

        When one of the processes fails, it ends the others. `--multi_gpu` is its word for several processes
        on one machine, with GPUs or without.
        """
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
        machines = ["--num_machines=1", "--machine_rank=0", "--main_process_port=0", "--gpu_ids=all"]
        kind = ["--mixed_precision=no", "--dynamo_backend=no", f"--num_processes={processes}"]
        return [*launch, *machines, *kind, "--module", module, *arguments]

    def first_failure(self, log: str) -> str | None:
        """The root cause that the launcher found last."""
        causes = _ROOT_CAUSE.findall(log)
        return f"process {causes[-1][0]}: {exit_words(int(causes[-1][1]))}" if causes else None


def exit_words(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
