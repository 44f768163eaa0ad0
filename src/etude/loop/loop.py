"""The loop over epochs, for one model or for several that are trained side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from etude.config.finetuning import FinetuneConfig
from etude.core.errors import EtudeError
from etude.core.history import History
from etude.core.job import TrainingJobRef, TrainingJobStatus
from etude.core.progress import Progress
from etude.core.skipped import Skipped


class Member(Protocol):
    """The trainer of one model, as the loop sees it. `EpochTrainer` is one."""

    @property
    def history(self) -> History:
        """What it has done so far."""

    def is_done(self, epoch: int) -> bool:
        """Whether the epoch is recorded."""

    def reason_to_rest(self, epoch: int) -> str | None:
        """Why the model is not to be trained in the epoch, or None when it is."""

    def reason_to_stop(self, epoch: int) -> str | None:
        """Why training should end after the epoch, or None."""

    async def rest_epoch(self, epoch: int, reason: str) -> None:
        """Record that the model was not trained in the epoch."""

    async def prepare_epoch(self, epoch: int, run_id: str) -> None:
        """Collect what `run_epoch` submits, without submitting it."""

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | Skipped:
        """Submit the epoch's job."""

    async def skip_epoch(self, epoch: int, skipped: Skipped) -> None:
        """Record that there was nothing to train on."""

    async def follow_job(self, epoch: int, ref: TrainingJobRef) -> TrainingJobStatus:
        """Wait for the job. Raises TrainingError when it is not completed."""

    async def finish_epoch(self, epoch: int, ref: TrainingJobRef, status: TrainingJobStatus) -> None:
        """Adopt the weights that the job made, and record the epoch."""

    async def validate(self, epoch: int) -> None:
        """Evaluate the weights of now, unless that was done."""

    async def prune(self) -> None:
        """Delete versions that are not worth keeping."""


async def run_loop(
    members: Sequence[Member], num_epochs: int, block: FinetuneConfig, run_id: str, progress: Progress
) -> None:
    """Train all members for `num_epochs` epochs, those of earlier processes included.

    In an epoch all of them collect from the weights as they are, then all are trained, and then all
    adopt. With `collect_ahead` they collect for the next epoch while they are trained, and adopt when both
    are done. The loop ends early when every member has a reason to stop.
    """
    await _validate(members, 0)
    for epoch in range(num_epochs):
        if not all(member.is_done(epoch) for member in members):
            progress.epoch_started(epoch + 1, num_epochs)
            ahead = epoch + 1 if block.collect_ahead and epoch + 1 < num_epochs else None
            await _train(members, epoch, ahead, run_id, progress)
        if (epoch + 1) % block.run_configuration.validation_interval == 0:
            await _validate(members, epoch + 1)
        for member in members:
            await member.prune()
        reasons = [member.reason_to_stop(epoch) for member in members]
        if all(reasons):
            told = "; ".join(dict.fromkeys(str(reason) for reason in reasons))
            progress.message(f"stopped after epoch {epoch + 1}: {told}")
            break
    for member in members:
        await member.validate(len(member.history.epochs))


async def submit_epoch(
    members: Sequence[Member], epoch: int, run_id: str
) -> list[tuple[Member, TrainingJobRef]]:
    """Collect and submit the epoch of each member that has not done it; those that have a job."""
    waiting = [member for member in members if not member.is_done(epoch)]
    due = [member for member in waiting if member.reason_to_rest(epoch) is None]
    if len(members) > 1:
        # All of them first: a model that is being trained here must not be sampled from.
        for member in due:
            await member.prepare_epoch(epoch, run_id)
    jobs: list[tuple[Member, TrainingJobRef]] = []
    for member in waiting:
        reason = member.reason_to_rest(epoch)
        if reason is not None:
            await member.rest_epoch(epoch, reason)
            continue
        job = await member.run_epoch(epoch, run_id)
        if isinstance(job, TrainingJobRef):
            jobs.append((member, job))
        else:
            await member.skip_epoch(epoch, job or Skipped(reason="run_epoch returned None"))
    return jobs


async def _train(
    members: Sequence[Member], epoch: int, ahead: int | None, run_id: str, progress: Progress
) -> None:
    """Train the epoch, and collect for the epoch `ahead` meanwhile."""
    jobs = await submit_epoch(members, epoch, run_id)
    if not jobs:
        return
    progress.phase("training")
    following = [asyncio.ensure_future(member.follow_job(epoch, job)) for member, job in jobs]
    collecting = [] if ahead is None else [asyncio.ensure_future(_collect(members, ahead, run_id, progress))]
    try:
        await asyncio.wait(following)
        if all(_error_of(task) is None for task in following):
            await asyncio.gather(*collecting, return_exceptions=True)
    finally:
        for task in (*following, *collecting):
            task.cancel()
        await asyncio.gather(*following, *collecting, return_exceptions=True)
    errors = [error for error in map(_error_of, (*following, *collecting)) if error is not None]
    if errors and collecting:
        # Nobody adopts before all is collected: a resumed run collects the rest from the same weights.
        raise errors[0]
    for (member, job), task in zip(jobs, following, strict=True):
        # One job that failed does not make the others' work void.
        if _error_of(task) is None:
            try:
                await member.finish_epoch(epoch, job, task.result())
            except EtudeError as failure:
                errors.append(failure)
    if errors:
        raise errors[0]


async def _collect(members: Sequence[Member], epoch: int, run_id: str, progress: Progress) -> None:
    """Prepare an epoch while the one before it is being trained."""
    for member in members:
        if member.reason_to_rest(epoch) is None:
            await member.prepare_epoch(epoch, run_id)
    progress.phase("training")


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    """What a task that is done ended with, when it did not end well."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()


async def _validate(members: Sequence[Member], epoch: int) -> None:
    """One evaluation for all: the first member runs the episodes, the others find them in the journal."""
    for member in members:
        await member.validate(epoch)
