"""Programs that Etude starts, watches and ends: on this machine, or on others through their launcher.

A program ends with the process that started it, even if that one is killed. All output goes to a log on this
machine, with secrets masked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from etude.core.errors import EngineError, EtudeError
from etude.engines.child_process import MaskedLog, exit_words, start_guarded
from etude.store.files import private_folder


@dataclass(frozen=True, slots=True)
class Command:
    """A program's command line on one machine."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to this process's own."""
    said: str = field(default="", repr=False)
    """Text for its standard input."""
    address: str = ""
    """Where it will listen, if it does."""

    def command(self, host: str) -> Command:
        """Return the same command for every machine."""
        return self


_START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "sys.exit(importlib.import_module(sys.argv[1]).main())"
)


def python_command(module: str, said: str) -> Command:
    """Return a command that calls a module's `main`, with this process's Python and module path.

    It reads the line `said` from its standard input.
    """
    return Command((sys.executable, "-c", _START, module, json.dumps(sys.path)), said=f"{said}\n")


class Program(Protocol):
    """A program to start, on any machine."""

    def command(self, host: str) -> Command:
        """Return the command; called on the machine that runs it, at address `host`. Raises EtudeError."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended."""

    how: str
    """In words: `ended with exit code 3`, `was killed by SIGSEGV`."""
    code: int | None = None
    """Its exit code, negative for a signal; None if unknown."""
    is_lost: bool = False
    """Whether its machine was lost with it."""

    @property
    def by_others(self) -> bool:
        """Whether another program killed it, such as the kernel when memory ran out."""
        return self.code in (-signal.SIGKILL, -signal.SIGTERM)


class Child(Protocol):
    """A started program."""

    log: Path
    """The file that its output is appended to."""
    begin: int
    """Size of the log in bytes before this program started."""
    node: str
    """Name or address of its machine; empty until known."""
    address: str
    """Where it listens, from its command."""
    pid: int

    async def ended(self) -> ProcessEnd:
        """Wait until it has ended and the log has all output; return how it ended."""

    def kill(self) -> None:
        """Kill it at once, with all processes that it started."""

    async def end(self, seconds: float) -> None:
        """Ask it to end, kill it after this many `seconds`, and return once it has ended."""

    async def catch_up(self) -> None:
        """Wait until the log has all output so far."""

    async def send_folder(self, folder: Path) -> str:
        """Make a local folder available on its machine, and return the path there. Raises EtudeError."""

    async def drop_folder(self, name: str) -> None:
        """Release the folder of this name that was sent to its machine."""


class NoRoom(EngineError):
    """No machine had room for a program in time."""


class Launcher(Protocol):
    """Starts programs."""

    address: str
    """Where programs reach this process: a host name or an IP address; empty for a Unix socket."""

    async def launch(self, program: Program, log: Path) -> Child:
        """Start a program, and append its output to a log. Raises NoRoom, EtudeError."""


class LocalChild(Child):
    """A process group on this machine, which a guard kills when this process is gone, even by SIGKILL."""

    def __init__(self, process: Process, lifeline: int, log: MaskedLog, command: Command) -> None:
        """The guard lives until the descriptor `lifeline` is closed."""
        self._process = process
        self._lifeline: int | None = lifeline
        self._output = log
        self.log, self.begin = log.path, log.begin
        self.node = socket.gethostname()
        self.address, self.pid = command.address, process.pid

    async def ended(self) -> ProcessEnd:
        """Wait until it has ended, then kill its guard and the processes that it started."""
        code = await self._process.wait()
        self.kill()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        await self._output.settled()
        how = f"ended with {exit_words(code)}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return ProcessEnd(how, code)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    async def end(self, seconds: float) -> None:
        if seconds:
            self._send(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.ended()
        self.kill()
        await self.ended()

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the process group while the guard lives; later its number may be reused."""
        if self._lifeline is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def catch_up(self) -> None:
        """Return at once: output is written to the log as it is printed."""

    async def send_folder(self, folder: Path) -> str:
        """Return the folder itself."""
        return str(folder)

    async def drop_folder(self, name: str) -> None:
        """Leave the folder to its owner."""


class LocalLauncher(Launcher):
    """Starts programs on this machine, each in its own session, so that Ctrl-C reaches this process alone."""

    address = ""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """`host` is the address of this machine at which programs listen."""
        self._host = host

    async def launch(self, program: Program, log: Path) -> LocalChild:
        command = program.command(self._host)
        private_folder(log.parent)
        with MaskedLog(log) as output:
            try:
                process, lifeline = await start_guarded(
                    *command.words,
                    stdin=PIPE,
                    stdout=output.fileno(),
                    stderr=output.fileno(),
                    env={**os.environ, **command.environment},
                )
            except OSError as error:
                raise EtudeError(f"'{command.words[0]}' cannot be started: {error.strerror}") from error
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(command.said.encode())
            await process.stdin.drain()
        process.stdin.close()
        return LocalChild(process, lifeline, output, command)
