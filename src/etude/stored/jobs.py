"""The training jobs of a run, as its journal has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from etude.core.job import TrainingStatusEnum
from etude.epochs.log import EpochLog
from etude.store.lock import locked_by
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
    metrics: dict[str, Any] = Field(default_factory=dict)


def jobs_of(run: Path) -> list[JobFacts]:
    """The jobs of a run in order, the one under way last. Raises StoreError."""
    with RunFolder.read(run) as folder:
        log = EpochLog(folder.journal)
        history = log.history(folder.name)
        jobs = [
            JobFacts(
                epoch=entry.epoch,
                name=entry.status.run_id,
                backend=entry.status.backend,
                status=str(entry.status.status),
                message=entry.status.message,
                seconds=entry.metrics.get("training_seconds"),
                trajectories=entry.metrics.get("filtered_trajectories"),
                version=None if entry.version is None else entry.version.number,
                metrics=entry.metrics.get("training") or {},
            )
            for entry in history.epochs
            if entry.status is not None
        ]
        epoch = len(history.epochs)
        submitted = log.submission(epoch)
        if submitted is None:
            return jobs
        under_way = locked_by(run / LOCK) is not None
        status = str(TrainingStatusEnum.RUNNING) if under_way else INTERRUPTED
        count = submitted.metrics.get("filtered_trajectories")
        ref = submitted.ref
        return [
            *jobs,
            JobFacts(epoch=epoch, name=ref.run_id, backend=ref.backend, status=status, trajectories=count),
        ]
