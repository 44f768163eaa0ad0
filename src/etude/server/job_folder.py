"""A job's folder: its lock, its worker's log, and the checkpoints that it resumes from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.errors import StoreError
from etude.store.files import draft_of
from etude.store.lock import locked_by

if TYPE_CHECKING:
    from etude.learner.learner import Learner, Snapshot
    from etude.models.policy import Policy

_FACTS = "step.json"
_LOG_LINES = 5
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)
"""As torch's launcher tells it."""


class JobFolder:
    """`jobs/<id>` in the data folder. A checkpoint is there whole or not at all."""

    def __init__(self, data_dir: Path, job: str) -> None:
        self._data_dir = data_dir
        self.path = data_dir / "jobs" / job

    @property
    def lock(self) -> Path:
        """Held by the job's worker for as long as it lives."""
        return self.lock_of(0)

    def lock_of(self, rank: int) -> Path:
        """Held by one of the processes that train the job together; the first is the one that writes."""
        return self.path / (f"lock-{rank}" if rank else "lock")

    def holders(self) -> list[int]:
        """The processes that train the job."""
        found = (locked_by(path) for path in sorted(self.path.glob("lock*")))
        return [pid for pid in found if pid is not None]

    @property
    def log(self) -> Path:
        """What the worker wrote to its standard output and error."""
        return self.path / "worker.log"

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
                found = _ROOT_CAUSE.findall(log.read().decode(errors="replace"))
        except OSError:
            return None
        return f"process {found[-1][0]}: {exit_words(int(found[-1][1]))}" if found else None

    def newest(self) -> int:
        """The step of the newest checkpoint; 0 when there is none."""
        names = [path.name for path in self.path.glob("step-*")]
        return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)

    def step_folder(self, step: int) -> Path:
        """Where a checkpoint is, or would be."""
        return self.path / f"step-{step}"

    def relative(self, path: Path) -> str:
        """A path as the database has it: the data folder may be moved."""
        return str(path.relative_to(self._data_dir))

    def save(
        self,
        step: int,
        facts: dict[str, Any],
        policy: Policy,
        learner: Learner,
        snapshot: Snapshot,
    ) -> str:
        """Write a checkpoint; the digest of its weights. Raises StoreError."""
        with draft_of(self.step_folder(step)) as draft:
            draft.mkdir()
            version = policy.save_version(draft, 1, snapshot.weights)
            learner.save(draft, snapshot.optimiser)
            (draft / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
        return version.digest

    def load(self, step: int, policy: Policy, learner: Learner) -> dict[str, Any]:
        """Put weights and optimiser to where they were; what was saved with them. Raises StoreError."""
        from etude.models.policy import WEIGHTS_FILE
        from etude.models.weights import load_tensors

        folder = self.step_folder(step)
        policy.load_tensors(load_tensors(folder / WEIGHTS_FILE))
        learner.restore(folder)
        try:
            facts: dict[str, Any] = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {folder / _FACTS}: {error}") from error
        return facts

    def prune(self, keep: Collection[int]) -> None:
        """Delete the checkpoints of other steps, and what a killed worker left half done."""
        for path in self.path.glob("step-*"):
            if path.name[5:].isdecimal() and int(path.name[5:]) not in keep:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.path.glob(".step-*.part"):
            shutil.rmtree(path, ignore_errors=True)


def exit_words(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
