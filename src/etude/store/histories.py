"""The histories and the training jobs of a run, as the records in its journal tell them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from etude.core.history import History
from etude.core.job import TrainingJobStatus, TrainingStatusEnum
from etude.core.records import ModelState, RunEnded
from etude.store.journal import Journal, read_states
from etude.store.run_folder import LOCK, RunFolder, lock_holder

INTERRUPTED = "interrupted"
"""The status of an unfinished job that no process follows. A resumed run continues it or makes it again."""


def read_histories(run: Path | Journal) -> dict[str | None, History]:
    """Return the history of each target of a run, as `read_states` does. Raises StoreError."""
    if isinstance(run, Path):
        with RunFolder.read(run) as folder:
            return read_histories(folder.journal)
    return {target: each.history for target, each in read_states(run).items()}


def end_of_run(states: Mapping[str | None, ModelState]) -> RunEnded | None:
    """Return the end of a run that is over for all of its targets, or None."""
    ends = [each.end for each in states.values() if each.end is not None]
    return ends[-1] if len(ends) == len(states) else None


class JobFacts(BaseModel, frozen=True):
    """The facts of one training job."""

    epoch: int
    """From 1; 0 is the warm-up."""
    name: str
    backend: str
    status: str
    """One of TrainingStatusEnum, or `interrupted`."""
    message: str | None = None
    seconds: float | None = None
    trajectories: int | None = None
    version: int | None = None
    """The version that the job made."""
    target: str | None = None
    """The target that the job trains, in a run with several models."""
    metrics: dict[str, Any] = Field(default_factory=dict)


def read_jobs(run: Path) -> list[JobFacts]:
    """Return the jobs of a run by epoch. Raises StoreError."""
    waiting = INTERRUPTED if lock_holder(run / LOCK) is None else str(TrainingStatusEnum.RUNNING)
    with RunFolder.read(run) as folder:
        jobs = [
            job
            for target, found in read_states(folder.journal).items()
            for job in _jobs(found, target, waiting)
        ]
    return sorted(jobs, key=lambda job: job.epoch)


def _jobs(found: ModelState, target: str | None, waiting: str) -> Iterator[JobFacts]:
    """Yield the jobs of a model. `waiting` is the status of jobs that have not ended."""
    for each in found.warm_up_jobs:
        yield _job(0, each.status, {}, target)
    submissions = [submission for _, submission in sorted(found.submissions.items())]
    last = {submission.epoch: submission for submission in submissions}
    for submission in submissions:
        ref = submission.ref
        going = TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=TrainingStatusEnum.RUNNING)
        status = found.ended.get(ref.run_id)
        entry = found.epochs.get(submission.epoch + 1) if submission is last[submission.epoch] else None
        facts = submission.metrics if entry is None else entry.metrics
        job = _job(submission.epoch + 1, status or going, facts, target)
        yield job if status is not None else job.model_copy(update={"status": waiting})


def _job(epoch: int, job: TrainingJobStatus, metrics: dict[str, Any], target: str | None) -> JobFacts:
    return JobFacts(
        epoch=epoch,
        name=job.run_id,
        backend=job.backend,
        status=str(job.status),
        message=job.message,
        seconds=metrics.get("training_seconds"),
        trajectories=metrics.get("filtered_trajectories"),
        version=None if job.version is None else job.version.number,
        target=target,
        metrics=job.metrics,
    )
