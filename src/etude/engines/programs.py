"""Programs that Etude or an episode starts: on this machine, or on others through their launcher.

A program ends with the process that started it, even if that one is killed. All output goes to a log on this
machine, with secrets masked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

from etude.core.errors import EngineError, EpisodeError, EtudeError
from etude.core.secrets import mask_secrets
from etude.store.files import open_private, private_folder


@dataclass(frozen=True, slots=True)
class Command:
    """A program's command line on one machine."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to this process's own."""
    stdin: str = field(default="", repr=False)
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


def python_command(module: str, line: str) -> Command:
    """Return a command that calls a module's `main`, with this process's Python and module path.

    Its standard input is `line`.
    """
    return Command((sys.executable, "-c", _START, module, json.dumps(sys.path)), stdin=f"{line}\n")


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
    def is_killed_by_others(self) -> bool:
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

    async def wait(self) -> ProcessEnd:
        """Wait until it has ended and the log has all output; return how it ended."""

    def kill(self) -> None:
        """Kill it at once, with its process group."""

    async def end(self, seconds: float) -> None:
        """Ask it to end, kill it after this many `seconds`, and return once it has ended."""

    async def catch_up(self) -> None:
        """Wait until the log has all output so far."""

    async def send_folder(self, folder: Path) -> str:
        """Make a local folder available on its machine, and return the path there. Raises EtudeError."""
        return str(folder)

    async def drop_folder(self, name: str) -> None:
        """Release the folder of this name that was sent to its machine."""


class NoRoom(EngineError):
    """No machine had room for a program in time."""


class Launcher(Protocol):
    """Starts programs."""

    address: str
    """Where programs reach this process: a host name or an IP address; empty on this machine."""

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

    async def wait(self) -> ProcessEnd:
        """Wait until it has ended, then kill its process group, which has its guard."""
        code = await self._process.wait()
        self.kill()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        await self._output.wait()
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return ProcessEnd(how, code)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    async def end(self, seconds: float) -> None:
        if seconds:
            self._send(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.wait()
        self.kill()
        await self.wait()

    async def catch_up(self) -> None:
        """Return at once: output is written to the log as it is printed."""

    async def drop_folder(self, name: str) -> None:
        """Leave the folder to its owner."""

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the process group while the guard lives; later its number may be reused."""
        if self._lifeline is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


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
            process.stdin.write(command.stdin.encode())
            await process.stdin.drain()
        process.stdin.close()
        return LocalChild(process, lifeline, output, command)


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

    Returns the process, and a descriptor to close once the group has been killed. Raises OSError.
    """
    path = options.get("env", os.environ).get("PATH")
    # A name with a folder is relative to the command's working directory.
    named = Path(options.get("cwd") or "", command[0]) if os.path.dirname(command[0]) else command[0]  # noqa: PTH120
    if shutil.which(named, path=path) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    child_end, lifeline = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _GUARDED, str(child_end), *command),
            pass_fds=[child_end],
            start_new_session=True,
            **options,
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(child_end)
    return process, lifeline


def last_lines(path: Path, count: int = 12) -> str:
    """Return the last `count` non-empty lines in a file's last 4 KiB; empty if it cannot be read."""
    return "\n".join([line for line in read_tail(path, 4096).splitlines() if line.strip()][-count:])


def last_exception(path: Path, start: int = 0) -> str | None:
    """Return the last exception that a log names from byte `start` on, with its text, or None."""
    named = re.findall(r"\b[A-Z]\w*(?:Error|Exception): .+", read_tail(path, 2**18, start))
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

    async def wait(self) -> None:
        """Wait until the file has all output, for a second at most: other processes may hold the pipe."""
        await asyncio.to_thread(self._thread.join, 1.0)


class MaskedLines:
    """Masks secrets in a stream of bytes, line by line."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, piece: bytes) -> bytes:
        """Add a piece, and return the lines that it completes, masked. An empty piece ends the last line."""
        data = self._rest + piece
        # Progress bars end their lines with a carriage return.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _LONGEST_LINE:
            end = len(data)
        # After the last piece, the rest is an unfinished line.
        lines, self._rest = (data[:end], data[end:]) if piece else (data, b"")
        return mask_secrets(lines.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _copy(reading: int, file: IO[bytes]) -> None:
    lines = MaskedLines()
    with file, os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            piece = pipe.read(2**16)
            # A full disk must not stop the child.
            with contextlib.suppress(OSError):
                file.write(lines.add(piece))
                file.flush()
            if not piece:
                return


_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE")
"""The variables that a program inherits. Others may hold keys."""
_MOST_BYTES = 2**20
_NOTED_CHARACTERS = 8_000


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and the last 1 MiB of each of its outputs."""

    returncode: int | None
    """The exit status, negative for a signal; None if the program ran out of time and was killed."""
    stdout: str
    stderr: str
    seconds: float

    def describe(self, name: str) -> str:
        """Return a sentence on how it ended."""
        if self.returncode is None:
            return f"{name} was stopped after {self.seconds:.1f} s"
        return f"{name} ended with status {self.returncode} after {self.seconds:.1f} s"

    def note(self, name: str) -> str:
        """Return the same sentence and the ends of its output."""
        printed = (("stdout", self.stdout), ("stderr", self.stderr))
        parts = [f"{stream}:\n{text[-_NOTED_CHARACTERS:]}" for stream, text in printed if text]
        return "\n".join([self.describe(name), *parts])


class ProgramFolder:
    """An episode's folders for programs, created when needed and removed at its end."""

    @cached_property
    def _root(self) -> tempfile.TemporaryDirectory[str]:
        folder = tempfile.TemporaryDirectory(prefix="etude-episode-", ignore_cleanup_errors=True)
        for name in ("work", "home"):
            Path(folder.name, name).mkdir()
        return folder

    @property
    def folder(self) -> Path:
        """The folder in which programs work."""
        return Path(self._root.name, "work")

    def remove(self) -> None:
        """Remove the folders. They are created again when needed."""
        if "_root" in self.__dict__:
            self.__dict__.pop("_root").cleanup()

    async def run(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], text: str, limit: float | None
    ) -> ProgramResult:
        """Run a program to its end or for `limit` seconds, and kill its process group.

        It also ends with this process, however that ends. Raises EpisodeError if it cannot be started.
        """
        # An empty home, without settings.
        home = str(Path(self._root.name, "home"))
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        started = time.monotonic()
        with contextlib.ExitStack() as files:
            # Files, because a surviving child process would hold a pipe open.
            given, stdout, stderr = (
                files.enter_context(tempfile.TemporaryFile(dir=self._root.name)) for _ in range(3)
            )
            given.write(text.encode())
            given.seek(0)
            try:
                process, lifeline = await start_guarded(
                    *command,
                    cwd=cwd,
                    env={**inherited, "HOME": home, **env},
                    stdin=given if text else DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                )
            except OSError as error:
                reason = f"cannot start {command[0]!r} in {cwd}: {error.strerror}"
                raise EpisodeError(f"{reason}; install it, or give its full path") from error
            returncode: int | None = None
            try:
                async with asyncio.timeout(limit):
                    returncode = await process.wait()
            except TimeoutError:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                os.close(lifeline)
                await asyncio.shield(process.wait())
            seconds = time.monotonic() - started
            return ProgramResult(returncode, _tail(stdout.fileno()), _tail(stderr.fileno()), seconds)


def _tail(file: int) -> str:
    size = os.fstat(file).st_size
    return os.pread(file, _MOST_BYTES, max(0, size - _MOST_BYTES)).decode("utf-8", "replace")


def last_line(result: ProgramResult) -> str:
    """Return the last line that a program printed, from its errors if there are any."""
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    return f"it last said: {lines[-1][:400]}" if lines else "it printed nothing"
