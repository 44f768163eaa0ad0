"""Programs that are started, watched and ended: here on this machine, and on others by who places them there.

A program ends with the process that has started it, even with one that is killed. All that it prints is in
its log on this machine, with secrets masked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from etude.core.errors import EtudeError
from etude.inference.child_process import MaskedLog, exit_words, start_guarded
from etude.store.files import private_folder


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a program on one machine."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables than this process has."""
    said: str = field(default="", repr=False)
    """The text that it reads from its standard input."""
    address: str = ""
    """Where it will listen, if it does."""

    def command(self, host: str) -> Command:
        """The same on every machine."""
        return self


class Program(Protocol):
    """Something to start, on whichever machine that is."""

    def command(self, host: str) -> Command:
        """The command, made on the machine that runs it and has that address. Raises EtudeError."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended."""

    how: str
    """`ended with exit code 3`, `was killed by SIGSEGV`."""
    code: int | None = None
    """Its exit code, negative for a signal; None where that is not known."""
    is_lost: bool = False
    """Whether it is gone with its machine."""

    @property
    def by_others(self) -> bool:
        """Whether another program killed it, such as the kernel when memory ran out."""
        return self.code in (-signal.SIGKILL, -signal.SIGTERM)


class Child(Protocol):
    """A program that was started."""

    log: Path
    """Where its output goes, behind that of earlier ones."""
    begin: int
    """The bytes that the log had before."""
    node: str
    """The name or address of its machine; empty until that is known."""
    address: str
    """Where it listens, as its command says."""
    pid: int

    async def ended(self) -> ProcessEnd:
        """Wait until it has ended, and all that it has printed is in the log; how it ended."""

    def kill(self) -> None:
        """End it at once, with all processes that it has started."""

    async def end(self, seconds: float) -> None:
        """Ask it to end, and kill it after so many seconds; it has ended then."""

    async def catch_up(self) -> None:
        """Wait until the log has all that was printed so far."""

    async def send_folder(self, folder: Path) -> str:
        """The path at which its machine has the files of a folder here. Raises EtudeError."""

    async def drop_folder(self, name: str) -> None:
        """Nobody needs the folder of that name any more that was sent to its machine."""


class Launcher(Protocol):
    """Starts programs."""

    address: str
    """Where they find this process: a host name or an IP address; empty for a Unix socket."""

    async def launch(self, program: Program, log: Path) -> Child:
        """Start a program, whose output goes to the end of a log. Raises EtudeError."""


class LocalChild(Child):
    """A process group on this machine, which a guard ends when this process is gone, even by SIGKILL."""

    def __init__(self, process: Process, lifeline: int, log: MaskedLog, command: Command) -> None:
        """The guard lives as long as the descriptor `lifeline`."""
        self._process = process
        self._lifeline: int | None = lifeline
        self._output = log
        self.log, self.begin = log.path, log.begin
        self.node = socket.gethostname()
        self.address, self.pid = command.address, process.pid

    async def ended(self) -> ProcessEnd:
        """Wait until it has ended; its guard ends then, and what it has started."""
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
        """To its process group, whose number may be another's once the guard in it is gone."""
        if self._lifeline is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def catch_up(self) -> None:
        """The log is written as it prints."""

    async def send_folder(self, folder: Path) -> str:
        """The folder itself."""
        return str(folder)

    async def drop_folder(self, name: str) -> None:
        """Leave the folder to whoever wrote it."""


class LocalLauncher(Launcher):
    """Starts programs on this machine, each in a session of its own: Ctrl-C goes to this process alone."""

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
