"""Child processes: a note by which the next parent ends an orphan, and the end of a log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

_BYTES = 4096


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
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])
