"""Child processes: how they end with their parent, at once or at its next start, and their logs' ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

_BYTES = 4096
_CAUSE_BYTES = 2**18
_EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+")

_GUARD = "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGKILL)"
"""Its standard input ends when whoever holds the other end does, however that comes about."""


async def guard_of(group: int) -> Process:
    """A process that kills a process group as soon as this process is no more, even by SIGKILL.

    To be killed itself once the group has ended: its number may then be another's.
    """
    command = (sys.executable, "-I", "-S", "-c", _GUARD, str(group))
    return await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
    )


def mark_process(path: Path, pid: int) -> None:
    """Note a process group by its leader."""
    path.write_text(json.dumps({"pid": pid, "started": _started(pid)}), encoding="utf-8")


def marked_process(path: Path) -> int | None:
    """The number of the noted process, if it still runs.

    A number that another process has got since is recognised by the time at which that one started.
    """
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        pid, started = int(noted["pid"]), noted["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if started is not None and _started(pid) == started else None


def kill_marked(path: Path) -> None:
    """Kill the noted process group, if it still runs."""
    pid = marked_process(path)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    path.unlink(missing_ok=True)


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None where that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The name in brackets may hold blanks; what follows it does not.
    return stat.rpartition(")")[2].split()[19]


def last_lines(path: Path, count: int = 12) -> str:
    """The last lines of a file of any size; nothing of one that cannot be read."""
    return "\n".join([line for line in _end_of(path, _BYTES).splitlines() if line.strip()][-count:])


def last_exception(path: Path, start: int = 0) -> str | None:
    """The last exception that a log names from the byte `start` on, with its text."""
    named = _EXCEPTION.findall(_end_of(path, _CAUSE_BYTES, start))
    return named[-1].strip() if named else None


def _end_of(path: Path, most: int, start: int = 0) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - most))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
