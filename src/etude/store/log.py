"""The epoch log: what the trainer keeps in the run's journal, so that no epoch is done twice.

Also the run's training jobs, as the log has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from etude.core.history import EpochEntry, History, ValidationEntry
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.store.journal import Journal
from etude.store.lock import locked_by
from etude.store.run_folder import LOCK, RunFolder

_EPOCHS = "trainer/epoch/"
_VALIDATIONS = "trainer/validation/"
_SUBMITTED = "trainer/submitted/"
_ATTEMPTS = "trainer/attempts/"
_STATUS = "trainer/status/"
_SAMPLED_FROM = "trainer/sampled_from/"
_TARGETS = "trainer/targets"

INTERRUPTED = "interrupted"
"""Submitted, not finished, and no process follows it: it goes on, or is made anew, when the run does."""


class Submission(BaseModel):
    """A job that was submitted, and what was known of its epoch by then."""

    model_config = ConfigDict(frozen=True)

    ref: TrainingJobRef
    metrics: dict[str, Any] = Field(default_factory=dict)
    curriculum_state: dict[str, Any] | None = None
    sampled_from: ModelVersion | None = None


class EpochLog:
    """Reads and writes the trainer's steps. All writes return when they are committed."""

    def __init__(self, journal: Journal, target: str | None = None) -> None:
        """`target` is whose log it is, in a run that trains several models."""
        self._journal = journal
        self._prefix = "" if target is None else f"targets/{target}/"

    def history(self, run_id: str) -> History:
        """Everything recorded so far."""
        epochs, validations = self._prefix + _EPOCHS, self._prefix + _VALIDATIONS
        return History(
            run_id=run_id,
            epochs=tuple(EpochEntry.model_validate(value) for _, value in self._journal.scan(epochs)),
            validations=tuple(
                ValidationEntry.model_validate(value) for _, value in self._journal.scan(validations)
            ),
        )

    async def add_epoch(self, entry: EpochEntry) -> None:
        """Record a finished epoch."""
        await self._put(self._key(_EPOCHS, entry.epoch), entry)

    async def add_validation(self, entry: ValidationEntry) -> None:
        """Record a finished validation."""
        await self._put(self._key(_VALIDATIONS, entry.epoch), entry)

    def submission(self, epoch: int, job: int = 1) -> Submission | None:
        """The `job`-th job of an epoch, when it was submitted."""
        value = self._journal.get(self._job_key(epoch, job))
        return None if value is None else Submission.model_validate(value)

    def submissions(self) -> list[tuple[int, int, Submission]]:
        """The jobs that were submitted, in order: the epoch, which of its jobs it is, what was recorded."""
        prefix, submissions = self._prefix + _SUBMITTED, []
        for key, value in self._journal.scan(prefix):
            epoch, _, job = key.removeprefix(prefix).partition(".")
            submissions.append((int(epoch), int(job or 1), Submission.model_validate(value)))
        return submissions

    async def add_submission(self, epoch: int, submission: Submission, job: int = 1) -> None:
        """Record that the `job`-th job of the epoch was submitted."""
        await self._put(self._job_key(epoch, job), submission)

    def status(self, ref: TrainingJobRef) -> TrainingJobStatus | None:
        """How a job ended, where that was recorded."""
        value = self._journal.get(f"{self._prefix}{_STATUS}{ref.run_id}")
        return None if value is None else TrainingJobStatus.model_validate(value)

    async def add_status(self, ref: TrainingJobRef, status: TrainingJobStatus) -> None:
        """Record how a job ended."""
        await self._put(f"{self._prefix}{_STATUS}{ref.run_id}", status)

    async def retry_last_failure(self) -> None:
        """Have the job that was submitted last submitted anew, when it failed."""
        for epoch, job, submission in self.submissions()[-1:]:
            status = self.status(submission.ref)
            if status is not None and status.status is not TrainingStatusEnum.COMPLETED:
                await self.forget_submission(epoch, job)

    async def sampled_from(self, epoch: int, now: ModelVersion | None) -> ModelVersion | None:
        """The weights that the epoch's episodes are sampled from: `now`, when it is asked the first time."""

        async def first() -> Any:
            return None if now is None else now.model_dump(mode="json")

        value = await self._journal.step(self._key(_SAMPLED_FROM, epoch), first)
        return None if value is None else ModelVersion.model_validate(value)

    def attempt(self, epoch: int) -> int:
        """How many jobs of the epoch have failed: part of the next one's idempotency key."""
        return int(self._journal.get(self._key(_ATTEMPTS, epoch), 0))

    async def forget_submission(self, epoch: int, job: int = 1) -> None:
        """The job failed: a resumed run submits the epoch again, as another job."""
        await self._journal.put(self._key(_ATTEMPTS, epoch), self.attempt(epoch) + 1)
        await self._journal.delete(self._job_key(epoch, job))

    async def _put(self, key: str, value: BaseModel) -> None:
        await self._journal.put(key, value.model_dump(mode="json"))

    def _job_key(self, epoch: int, job: int) -> str:
        return self._key(_SUBMITTED, epoch) + ("" if job == 1 else f".{job:04d}")

    def _key(self, prefix: str, epoch: int) -> str:
        """Padded, so that the order of the keys is that of the epochs."""
        return f"{self._prefix}{prefix}{epoch:08d}"


async def note_targets(journal: Journal, names: Iterable[str]) -> None:
    """Keep which targets a run trains, so that others can read their logs."""
    await journal.put(_TARGETS, list(names))


def histories(journal: Journal, run_id: str) -> dict[str, History]:
    """The history of each target, in the order of the config; empty for a run that trains one model."""
    return {name: EpochLog(journal, name).history(run_id) for name in journal.get(_TARGETS, [])}


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
        jobs = [job for target in targets for job in _jobs(folder, target, under_way)]
    return sorted(jobs, key=lambda job: job.epoch)


def _jobs(run: RunFolder, target: str | None, under_way: bool) -> Iterator[JobFacts]:
    log = EpochLog(run.journal, target)
    entries = {entry.status.run_id: entry for entry in log.history(run.name).trained if entry.status}
    for epoch, _, submission in log.submissions():
        entry = entries.pop(submission.ref.run_id, None)
        metrics = submission.metrics if entry is None else entry.metrics
        ended = log.status(submission.ref) if entry is None else entry.status
        waiting = str(TrainingStatusEnum.RUNNING) if under_way else INTERRUPTED
        yield _job(epoch + 1, ended or submission.ref, metrics, target, waiting)
    for entry in entries.values():
        if entry.status is not None:
            yield _job(entry.epoch, entry.status, entry.metrics, target)


def _job(
    epoch: int,
    job: TrainingJobRef | TrainingJobStatus,
    metrics: dict[str, Any],
    target: str | None,
    waiting: str = "",
) -> JobFacts:
    """A job that ended, by its status, or one that is `waiting`, by its reference."""
    facts: dict[str, Any] = {"status": waiting}
    if isinstance(job, TrainingJobStatus):
        result = job.metadata or {}
        facts = {
            "status": str(job.status),
            "message": job.message,
            "seconds": metrics.get("training_seconds"),
            "version": (result.get("model_version") or {}).get("number"),
            "metrics": result.get("metrics") or {},
        }
    trajectories = metrics.get("filtered_trajectories")
    return JobFacts(
        epoch=epoch, name=job.run_id, backend=job.backend, target=target, trajectories=trajectories, **facts
    )
