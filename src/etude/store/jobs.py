"""The training jobs of a run, as its journal has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from etude.core.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.store.lock import locked_by
from etude.store.log import EpochLog, histories
from etude.store.run_folder import LOCK, RunFolder

INTERRUPTED = "interrupted"
"""Submitted, not finished, and no process follows it: it goes on, or is made anew, when the run does."""


class JobFacts(BaseModel):
    """One training job."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    """From 0."""
    name: str
    backend: str
    status: str
    """One of TrainingStatusEnum, or `interrupted`."""
    message: str | None = None
    seconds: float | None = None
    trajectories: int | None = None
    version: int | None = None
    """The version that it made."""
    target: str | None = None
    """Which of the run's models it trains, where there are several."""
    metrics: dict[str, Any] = Field(default_factory=dict)


def jobs_of(run: Path) -> list[JobFacts]:
    """The jobs of a run by epoch, those under way last. Raises StoreError."""
    under_way = locked_by(run / LOCK) is not None
    with RunFolder.read(run) as folder:
        targets: list[str | None] = [*histories(folder.journal, folder.name)] or [None]
        found = [job for target in targets for job in _jobs(folder, target, under_way)]
    return sorted(found, key=lambda job: job.epoch)


def _jobs(run: RunFolder, target: str | None, under_way: bool) -> Iterator[JobFacts]:
    log = EpochLog(run.journal, target)
    entries = {entry.status.run_id: entry for entry in log.history(run.name).trained if entry.status}
    for epoch, _, submission in log.submissions():
        ref, entry = submission.ref, entries.pop(submission.ref.run_id, None)
        status = log.status(ref) if entry is None else entry.status
        if status is None:
            waiting = TrainingStatusEnum.RUNNING if under_way else INTERRUPTED
            yield _facts(epoch + 1, ref, str(waiting), submission.metrics, target)
        else:
            yield _ended(epoch + 1, status, submission.metrics if entry is None else entry.metrics, target)
    for entry in entries.values():
        if entry.status is not None:
            yield _ended(entry.epoch, entry.status, entry.metrics, target)


def _ended(epoch: int, status: TrainingJobStatus, metrics: dict[str, Any], target: str | None) -> JobFacts:
    made = status.metadata or {}
    facts = _facts(epoch, status, str(status.status), metrics, target)
    return facts.model_copy(
        update={
            "message": status.message,
            "seconds": metrics.get("training_seconds"),
            "version": (made.get("model_version") or {}).get("number"),
            "metrics": made.get("metrics") or {},
        }
    )


def _facts(
    epoch: int,
    job: TrainingJobRef | TrainingJobStatus,
    status: str,
    metrics: dict[str, Any],
    target: str | None,
) -> JobFacts:
    return JobFacts(
        epoch=epoch,
        name=job.run_id,
        backend=job.backend,
        status=status,
        trajectories=metrics.get("filtered_trajectories"),
        target=target,
    )
