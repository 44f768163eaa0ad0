"""The training jobs of a run, as its journal has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from etude.core.job import TrainingStatusEnum
from etude.epochs.log import EpochLog, histories
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
    history = log.history(run.name)
    for entry in history.epochs:
        if entry.status is not None:
            yield JobFacts(
                epoch=entry.epoch,
                name=entry.status.run_id,
                backend=entry.status.backend,
                status=str(entry.status.status),
                message=entry.status.message,
                seconds=entry.metrics.get("training_seconds"),
                trajectories=entry.metrics.get("filtered_trajectories"),
                version=None if entry.version is None else entry.version.number,
                target=target,
                metrics=entry.metrics.get("training") or {},
            )
    submitted = log.submission(len(history.epochs))
    if submitted is not None:
        yield JobFacts(
            epoch=len(history.epochs) + 1,
            name=submitted.ref.run_id,
            backend=submitted.ref.backend,
            status=str(TrainingStatusEnum.RUNNING) if under_way else INTERRUPTED,
            trajectories=submitted.metrics.get("filtered_trajectories"),
            target=target,
        )
