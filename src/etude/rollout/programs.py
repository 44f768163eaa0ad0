"""Programs that an episode runs, such as a coding agent's command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from etude.core.errors import EpisodeError
from etude.engines.programs import start_guarded

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
        made = tempfile.TemporaryDirectory(prefix="etude-episode-", ignore_cleanup_errors=True)
        for name in ("work", "home"):
            Path(made.name, name).mkdir()
        return made

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
        """Run a program to its end or for `limit` seconds, and kill all processes that it has started.

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
