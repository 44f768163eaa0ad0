"""The epoch log: the trainer's records in the run's journal, so that no epoch is done twice.

It also lists the training jobs of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from etude.core.history import Entry, History, Recovery, ValidationEntry, WarmUpEntry, WarmUpJob
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.store.journal import Journal
from etude.store.run_folder import LOCK, RunFolder, lock_holder

_TARGETS = "trainer/targets"

INTERRUPTED = "interrupted"
"""The status of an unfinished job that no process follows. A resumed run continues it or makes it again."""


class Submission(BaseModel, frozen=True):
    """A submitted job, with the facts about its epoch at that time."""

    ref: TrainingJobRef
    metrics: dict[str, Any] = Field(default_factory=dict)
    curriculum_state: dict[str, Any] | None = None
    sampled_from: ModelVersion | None = None


class EpochLog:
    """Reads and writes the trainer's steps. All writes return when they are committed."""

    def __init__(self, journal: Journal, target: str | None = None) -> None:
        """`target` names the model, in a run that trains several."""
        self._journal = journal
        self._prefix = "trainer/" if target is None else f"targets/{target}/trainer/"

    def history(self, run_id: str) -> History:
        """Return everything recorded so far."""
        epochs, validations, recoveries = (
            [value for _, value in self._journal.scan(f"{self._prefix}{kind}/")]
            for kind in ("epoch", "validation", "recovery")
        )
        warm_up = self._journal.get(f"{self._prefix}warm-up")
        content = {"run_id": run_id, "epochs": epochs, "validations": validations, "warm_up": warm_up}
        content |= {"recoveries": recoveries, "base": self._journal.get(f"{self._prefix}base")}
        return History.model_validate(content)

    def warm_up_jobs(self) -> list[WarmUpJob]:
        """Return the warm-up jobs so far, in order."""
        prefix = f"{self._prefix}warm-up-jobs/"
        return [WarmUpJob.model_validate(value) for _, value in self._journal.scan(prefix)]

    async def add_warm_up_job(self, number: int, job: WarmUpJob) -> None:
        """Record a warm-up job, by its number from 1."""
        await self._put(self._key("warm-up-jobs", number), job)

    async def add_warm_up(self, entry: WarmUpEntry) -> None:
        """Record that the warm-up is over."""
        await self._put(f"{self._prefix}warm-up", entry)

    def warm_up_attempts(self) -> int:
        """Return how many warm-up jobs have failed, which is part of the next one's idempotency key."""
        return int(self._journal.get(f"{self._prefix}warm-up-attempts", 0))

    async def warm_up_failed(self) -> None:
        """Record that a job failed. A resumed run submits it again under another key."""
        await self._journal.put(f"{self._prefix}warm-up-attempts", self.warm_up_attempts() + 1)

    async def forget_warm_up(self) -> None:
        """Forget the warm-up and its jobs. Its measurements stay."""
        await self._journal.delete(f"{self._prefix}warm-up-jobs/")
        await self._journal.forget(f"{self._prefix}warm-up")

    async def add_recovery(self, number: int, recovery: Recovery) -> None:
        """Record that the run continues without damaged weights, by a number from 1."""
        await self._put(self._key("recovery", number), recovery)

    async def add_entry(self, entry: Entry) -> None:
        """Record a finished epoch or validation."""
        await self._put(self._key(entry.kind, entry.epoch), entry)

    def replace_entry_soon(self, entry: Entry) -> None:
        """Record a finished epoch or validation again. This is committed before every later record."""
        self._journal.put_soon(self._key(entry.kind, entry.epoch), entry.model_dump(mode="json"))

    async def add_base(self, entry: ValidationEntry) -> None:
        """Record the validation of the base model before a warm-up."""
        await self._put(f"{self._prefix}base", entry)

    def pauses(self) -> list[str]:
        """Return the alarms that have paused the run, each with the entry in which it rang."""
        return list(self._journal.get(f"{self._prefix}pauses", []))

    async def add_pauses(self, names: Iterable[str]) -> None:
        """Record that alarms pause the run now."""
        await self._journal.put(f"{self._prefix}pauses", [*self.pauses(), *names])

    def submission(self, epoch: int, job: int = 1) -> Submission | None:
        """Return the `job`-th job of an epoch, if it was submitted."""
        value = self._journal.get(self._job_key(epoch, job))
        return None if value is None else Submission.model_validate(value)

    def submissions(self) -> list[tuple[int, int, Submission]]:
        """Return the submitted jobs in order: the epoch, the number of the job in it, and its record."""
        prefix, submissions = f"{self._prefix}submitted/", []
        for key, value in self._journal.scan(prefix):
            epoch, _, job = key.removeprefix(prefix).partition(".")
            submissions.append((int(epoch), int(job or 1), Submission.model_validate(value)))
        return submissions

    def find_submission(self, name: str) -> Submission | None:
        """Return the record of the job with a name, or None."""
        prefix = f"{self._prefix}submitted/"
        rows = self._journal.select(
            "SELECT value FROM steps WHERE key >= ? AND key < ? AND instr(value, ?) ORDER BY key",
            (prefix, f"{prefix[:-1]}0", json.dumps(name)),
        )
        submissions = (Submission.model_validate(json.loads(value)) for (value,) in rows)
        return next((each for each in submissions if each.ref.run_id == name), None)

    async def add_submission(self, epoch: int, submission: Submission, job: int = 1) -> None:
        """Record that the `job`-th job of the epoch was submitted."""
        await self._put(self._job_key(epoch, job), submission)

    def status(self, ref: TrainingJobRef) -> TrainingJobStatus | None:
        """Return how a job ended, if that was recorded."""
        value = self._journal.get(f"{self._prefix}status/{ref.run_id}")
        return None if value is None else TrainingJobStatus.model_validate(value)

    async def add_status(self, ref: TrainingJobRef, status: TrainingJobStatus) -> None:
        """Record how a job ended."""
        await self._put(f"{self._prefix}status/{ref.run_id}", status)

    async def retry_last_failure(self) -> None:
        """Forget the job that was submitted last, if it failed, so that it is submitted again."""
        for epoch, job, submission in self.submissions()[-1:]:
            status = self.status(submission.ref)
            if status is not None and status.status is not TrainingStatusEnum.COMPLETED:
                await self.forget_submission(epoch, job)

    async def sampled_from(
        self, epoch: int, now: ModelVersion | None, *, again: bool = False
    ) -> ModelVersion | None:
        """Return the weights that sample the epoch, or sample it `again`. The first call stores `now`."""

        async def first() -> Any:
            return None if now is None else now.model_dump(mode="json")

        value = await self._journal.step(
            self._key("sampled_again" if again else "sampled_from", epoch), first
        )
        return None if value is None else ModelVersion.model_validate(value)

    def attempt(self, epoch: int) -> int:
        """Return how many jobs of the epoch have failed, which is part of the next one's idempotency key."""
        return int(self._journal.get(self._key("attempts", epoch), 0))

    async def forget_submission(self, epoch: int, job: int = 1) -> None:
        """Forget a job that failed. A resumed run submits the epoch again under another key."""
        await self._journal.put(self._key("attempts", epoch), self.attempt(epoch) + 1)
        await self._journal.delete(self._job_key(epoch, job))

    async def forget_after(self, epoch: int) -> None:
        """Forget the epochs after one (from 1), with their jobs and validations.

        Their episodes stay, with the weights that sampled them: the epochs are trained again on them. The
        epochs go last, so that a run killed before the end goes back again.
        """
        for index, _, submission in self.submissions():
            if index >= epoch:
                await self._journal.forget(f"{self._prefix}status/{submission.ref.run_id}")
        for kind, first in (("submitted", epoch), ("validation", epoch + 1), ("epoch", epoch + 1)):
            await self._journal.delete(f"{self._prefix}{kind}/", start=self._key(kind, first))

    async def _put(self, key: str, value: BaseModel) -> None:
        await self._journal.put(key, value.model_dump(mode="json"))

    def _job_key(self, epoch: int, job: int) -> str:
        return self._key("submitted", epoch) + ("" if job == 1 else f".{job:04d}")

    def _key(self, kind: str, epoch: int) -> str:
        """Return a key whose padded number sorts keys in the order of epochs."""
        return f"{self._prefix}{kind}/{epoch:08d}"


async def note_targets(journal: Journal, names: Iterable[str]) -> None:
    """Record which targets a run trains, so that other programs can read their logs."""
    await journal.put(_TARGETS, list(names))


def histories(journal: Journal, run_id: str) -> dict[str | None, History]:
    """Return the history of each target, in the order of the config. With one model, the key is None."""
    targets = journal.get(_TARGETS) or [None]
    return {target: EpochLog(journal, target).history(run_id) for target in targets}


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
            for target, history in histories(folder.journal, folder.name).items()
            for job in _jobs(EpochLog(folder.journal, target), history, target, waiting)
        ]
    return sorted(jobs, key=lambda job: job.epoch)


def _jobs(log: EpochLog, history: History, target: str | None, waiting: str) -> Iterator[JobFacts]:
    """Yield the jobs of a log. `waiting` is the status of jobs that have not ended."""
    for each in log.warm_up_jobs():
        yield _job(0, each.status, {}, target)
    trained = {entry.status.run_id: entry for entry in history.trained if entry.status}
    for epoch, _, submission in log.submissions():
        entry, ref = trained.pop(submission.ref.run_id, None), submission.ref
        status = log.status(ref) if entry is None else entry.status
        going = TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=TrainingStatusEnum.RUNNING)
        job = _job(epoch + 1, status or going, (entry or submission).metrics, target)
        yield job if status is not None else job.model_copy(update={"status": waiting})
    for entry in trained.values():
        if entry.status is not None:
            yield _job(entry.epoch, entry.status, entry.metrics, target)


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
