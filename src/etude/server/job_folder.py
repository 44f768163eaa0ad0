"""A job's folder: its locks, its worker's log, and the checkpoints that it resumes from."""

from __future__ import annotations

import re
from pathlib import Path

from etude.jobs.folders import StateFolders
from etude.store.lock import locked_by

_LOG_LINES = 5
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)
"""In the words of torch's launcher."""


class JobFolder:
    """`jobs/<id>` in the data folder."""

    def __init__(self, data_dir: Path, job: str) -> None:
        self.path = data_dir / "jobs" / job
        self.log = self.path / "worker.log"
        """The worker's standard output and error."""
        self.checkpoints = StateFolders(self.path, "step-", "checkpoint")

    def lock_of(self, rank: int) -> Path:
        """Held by a process that trains the job for as long as it lives; rank 0 is the one that writes."""
        return self.path / (f"lock-{rank}" if rank else "lock")

    def holders(self) -> list[int]:
        """The processes that train the job."""
        holders = (locked_by(path) for path in sorted(self.path.glob("lock*")))
        return [pid for pid in holders if pid is not None]

    def last_lines(self) -> str:
        """The end of the worker's log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())

    def log_size(self) -> int:
        """Bytes of the worker's log."""
        return self.log.stat().st_size if self.log.is_file() else 0

    def first_failure(self, begin: int) -> str | None:
        """Which of several processes ended first and how, as the launcher has logged from `begin` on."""
        try:
            with self.log.open("rb") as log:
                log.seek(begin)
                causes = _ROOT_CAUSE.findall(log.read().decode(errors="replace"))
        except OSError:
            return None
        return f"process {causes[-1][0]}: {exit_words(int(causes[-1][1]))}" if causes else None


def exit_words(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
