"""A runner's process on this machine: started with a guard, watched, and its end in words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO, Protocol

from etude.core.errors import EtudeError
from etude.inference.child_process import Launcher as TeamLauncher
from etude.inference.child_process import MaskedLog, last_exception, last_lines, start_guarded
from etude.store.files import private_folder

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from etude.runners.program import main; main()"
)


@dataclass(frozen=True)
class Invitation:
    """How a runner finds its head, and is known by it."""

    address: str
    """The path of a Unix socket, or `host:port`."""
    number: int
    key: str = field(repr=False)
    """In hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a runner's process ended."""

    how: str
    """`ended with exit code 3`, `was killed by SIGSEGV`."""
    by_others: bool = False
    """Whether another program killed it, such as the kernel when memory ran out."""
    is_lost: bool = False
    """Whether it is gone with its machine."""


class RunnerProcess(Protocol):
    """The process of a runner, wherever it was placed."""

    log: str
    """Where its output goes."""
    node: str
    """The name or address of its machine; empty until that is known."""

    async def ended(self) -> ProcessEnd:
        """Wait until it has ended; how it did."""

    def kill(self) -> None:
        """End it at once, with all processes that it has started."""

    def last_words(self) -> str:
        """The end of its output."""


class Launcher(Protocol):
    """Places runners."""

    address: str
    """Where runners find the head: a host name or an IP address; empty for a Unix socket."""

    async def launch(self, invitation: Invitation, place: int) -> RunnerProcess:
        """Start a runner. Raises EtudeError when that is not possible."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines of a `cluster` block."""

    runners: Launcher | None
    """None where episodes are played as without a cluster."""
    dashboard: str | None = None
    """The address of its own web page, where it has one."""
    learners: Callable[..., TeamLauncher] | None = None
    """Makes what starts teams that train: `learners(desk, on_gpus=…)`, with the import path of what makes
    the object that the processes call. None where jobs train in the run's own process."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the job that trains there: one has room at a time."""


class LocalProcess:
    """A process group on this machine, which a guard ends when this process is gone, even by SIGKILL."""

    def __init__(self, process: Process, lifeline: int, path: Path, log: MaskedLog | None = None) -> None:
        """The guard lives as long as `lifeline`; `log` is what writes to `path`, where that is done here."""
        self._process = process
        self._lifeline: int | None = lifeline
        self._path = path
        self._log = log
        self.log = str(path)
        self.node = socket.gethostname()

    async def ended(self) -> ProcessEnd:
        """Wait until it has ended; its guard ends then, and what it has started."""
        code = await self._process.wait()
        self.kill()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._log is not None:
            await self._log.settled()
        if code >= 0:
            return ProcessEnd(f"ended with exit code {code}")
        name = signal.Signals(-code).name
        return ProcessEnd(f"was killed by {name}", by_others=name in ("SIGKILL", "SIGTERM"))

    def kill(self) -> None:
        """Kill its process group, whose number may be another's once the guard in it is gone."""
        if self._lifeline is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last exception of its log, or else its last lines."""
        return last_exception(self._path) or last_lines(self._path)


class LocalLauncher:
    """Starts runners on this machine; the output of each goes to a file of `folder`."""

    address = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def launch(self, invitation: Invitation, place: int) -> LocalProcess:
        """Start a runner with this program's Python, module path, environment and folder."""
        private_folder(self._folder)
        path = self._folder / f"{place}.log"
        with MaskedLog(path) as log:
            return await start_runner(invitation, log.fileno(), path, log)


async def start_runner(
    invitation: Invitation, output: int | IO[bytes], path: Path, log: MaskedLog | None = None
) -> LocalProcess:
    """Start a runner that writes to `output`, which is the log at `path`. Raises EtudeError."""
    command = (sys.executable, "-c", _START, json.dumps(sys.path))
    try:
        # A session of its own: Ctrl-C goes to the head alone.
        process, lifeline = await start_guarded(*command, stdin=PIPE, stdout=output, stderr=output)
    except OSError as error:
        raise EtudeError(f"a runner cannot be started: {error}") from error
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(f"{json.dumps(astuple(invitation))}\n".encode())
        await process.stdin.drain()
    return LocalProcess(process, lifeline, path, log)


@asynccontextmanager
async def killed_after(process: RunnerProcess, seconds: float) -> AsyncIterator[None]:
    """Within the block it may come to its end; after that it is killed, and its end waited for."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        pass
    finally:
        process.kill()
        await process.ended()


def allow_open_files() -> None:
    """Let this process have as many files and connections open as the system allows; many say 1,024 first."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
