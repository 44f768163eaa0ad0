"""The jobs of an ART model: how far each is, and what is kept of it in a file of the run.

ART itself has no table of jobs.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from etude.core.errors import StoreError
from etude.core.job import ModelVersion, TrainingStatusEnum
from etude.integrations.art.wire import ArtGroups
from etude.jobs.folders import JobContent
from etude.store.files import write_atomically

_TOTALS = ("num_gradient_steps", "data/step_num_gradient_steps")
"""The count of gradient steps that a job will make, in 0.4 and in 0.5; each line has it."""


class ArtJob(BaseModel, frozen=True):
    """A job, by what can be known of it from outside."""

    content: JobContent
    """Its data and options; every job starts from the model's last step."""
    before: int
    """The model's step when the job was submitted; it is done when the step is higher."""
    status: TrainingStatusEnum = TrainingStatusEnum.RUNNING
    message: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    version: ModelVersion | None = None
    """The version that it made, once it is completed."""


class _Kept(BaseModel, frozen=True):
    """The content of the file."""

    base: ModelVersion | None = None
    jobs: dict[str, ArtJob] = Field(default_factory=dict)


class ArtJobs:
    """All jobs by name, and where the run began. Each change is on the disk before it is known here."""

    def __init__(self, path: Path | None) -> None:
        """Read the file, where there is one; without a path nothing is on a disk. Raises StoreError when it
        is damaged."""
        self._path = path
        self._kept = _Kept()
        if path is not None and path.exists():
            try:
                self._kept = _Kept.model_validate_json(path.read_bytes())
            except (OSError, ValidationError) as error:
                raise StoreError(
                    f"{path} is damaged ({error}); delete it and resume (`etude resume`)"
                ) from error

    @property
    def base(self) -> ModelVersion | None:
        """The version that the run began with; None before it did."""
        return self._kept.base

    def get(self, name: str) -> ArtJob | None:
        """A job; None when it was never submitted."""
        return self._kept.jobs.get(name)

    def unfinished(self) -> dict[str, ArtJob]:
        """Jobs that were submitted and have no end."""
        return {name: job for name, job in self._kept.jobs.items() if not job.status.is_final}

    def steps(self) -> set[int]:
        """Every step that the model may have reached by these jobs."""
        return {job.before + more for job in self._kept.jobs.values() for more in (0, 1)}

    def put_base(self, version: ModelVersion) -> None:
        """Keep what the run begins with. Raises StoreError."""
        self._keep(_Kept(base=version, jobs=self._kept.jobs))

    def put(self, name: str, job: ArtJob) -> None:
        """Keep a job. Raises StoreError."""
        self._keep(_Kept(base=self._kept.base, jobs={**self._kept.jobs, name: job}))

    def _keep(self, kept: _Kept) -> None:
        if self._path is not None:
            write_atomically(self._path, kept.model_dump_json(indent=2))
        self._kept = kept


@dataclass(slots=True)
class ArtProgress:
    """How far a job is, and its metrics."""

    given: ArtGroups
    steps: int = 0
    """Gradient steps that were made."""
    total: int | None = None
    """Gradient steps that the server means to make."""
    _values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, line: dict[str, float]) -> None:
        """Take in the metrics of one line. A server that found nothing to train on says 0 steps."""
        totals = [int(line[name]) for name in _TOTALS if name in line]
        self.total = totals[0] if totals else self.total
        self.steps += 0 if totals and totals[0] == 0 else 1
        for name, value in line.items():
            if name not in _TOTALS and math.isfinite(value):
                self._values[name].append(value)

    @property
    def percent(self) -> float | None:
        """Percent done, where the server says how much there is."""
        return min(100.0, 100.0 * self.steps / self.total) if self.total else None

    @property
    def metrics(self) -> dict[str, float]:
        """The averages over the gradient steps, and what the job was given."""
        means = {name: math.fsum(values) / len(values) for name, values in self._values.items()}
        return means | {
            "gradient_steps": float(self.steps),
            "submitted_groups": float(len(self.given.groups)),
            "submitted_trajectories": float(self.given.trajectories),
            "rejected_trajectories": float(sum(self.given.rejected.values())),
        }
