"""The bookkeeper: journals the epochs of a trainer that implements only the interface."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.core.errors import EtudeError, TrainingError
from etude.core.history import EpochEntry, ValidationEntry
from etude.core.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.progress import Progress
from etude.core.skipped import Skipped
from etude.core.trajectory import TrajectoryCollection
from etude.loop.ledger import Ledger
from etude.loop.summary import reason_for_skip, summary_of
from etude.loop.warnings import warn


class Bookkeeper:
    """Follows what a trainer does and records it, as `EpochTrainer` records its own epochs.

    It is resumed by doing the same again: episodes come from the journal, a job that was submitted is not
    submitted again, and one that ended ends at once, in the same way. New weights are adopted when the
    trainer is told that their job is completed.
    """

    def __init__(
        self,
        ledger: Ledger,
        progress: Progress,
        curriculum_state: Callable[[], dict[str, Any]],
        curriculum_facts: Callable[[], dict[str, Any]],
    ) -> None:
        """`curriculum_facts` says what the curriculum has left of the epoch's groups, as metrics."""
        self._ledger = ledger
        self._record = ledger.record
        self._progress = progress
        self._curriculum_state = curriculum_state
        self._curriculum_facts = curriculum_facts
        self._epochs: dict[str, int] = {}
        """Of the jobs of this process, by name."""
        self._submitted_at: dict[str, float] = {}
        self._visited: set[int] = set()
        self._over: set[int] = set()
        self._reasons: dict[int, str] = {}
        self.failure: EtudeError | None = None
        """Why data was refused or weights could not be adopted, whatever the trainer made of that."""

    async def submit(self, collection: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start the job of the epoch, or give back the one that it has."""
        epoch = self._ledger.epoch
        try:
            ref = await self._ledger.submit(
                collection, facts=self._curriculum_facts(), curriculum_state=self._curriculum_state()
            )
        except EtudeError as error:
            self._reasons[epoch], self.failure = str(error), error
            raise
        if isinstance(ref, TrainingJobRef):
            self._epochs[ref.run_id] = epoch
            self._submitted_at.setdefault(ref.run_id, time.monotonic())
            if self._record.ended(ref) is None:
                self._progress.phase("training")
        else:
            self._reasons[epoch] = ref.reason
        return ref

    async def followed(
        self, ref: TrainingJobRef, ask: Callable[[], Awaitable[TrainingJobStatus]]
    ) -> TrainingJobStatus:
        """How a job stands: as it was recorded, or else as the backend says.

        When it is over for the first time, its weights are adopted and its epoch is recorded.
        """
        recorded = self._record.ended(ref)
        if recorded is not None:
            if ref.run_id in self._epochs:
                self._over.add(self._epochs[ref.run_id])
                if self._record.log.status(ref) is None:
                    await self._record.log.add_status(ref, recorded)
            return recorded
        status = await ask()
        if ref.run_id in self._epochs and status.status.is_final:
            await self._settle(ref, status)
        return status

    def entered(self, epoch: int, num_epochs: int) -> int:
        """`run_epoch` begins; the number of its epoch: another one where a trainer gives one twice."""
        if epoch in self._visited:
            epoch = max(self._visited) + 1
        self._visited.add(epoch)
        if not self._record.is_done(epoch):
            self._progress.epoch_started(epoch + 1, num_epochs)
            self._progress.phase("collecting")
        return epoch

    async def left(self, epoch: int, outcome: object) -> None:
        """`run_epoch` is over; without a job there was nothing to train on."""
        if epoch in self._epochs.values():
            await self._record.flush()
            return
        self._over.add(epoch)
        if self._record.is_done(epoch):
            return
        reason = outcome.reason if isinstance(outcome, Skipped) else self._reasons.get(epoch)
        metrics = {**await self._ledger.metrics(epoch), **self._curriculum_facts()}
        if reason is None:
            reason = f"run_epoch submitted nothing; {reason_for_skip(metrics)}"
        await self._record.add_epoch(
            epoch,
            metrics,
            skipped=reason,
            version=self._ledger.line.version,
            sampled_from=await self._ledger.sampled_from(epoch),
            curriculum_state=self._curriculum_state(),
        )
        self._ledger.finished(epoch)
        self._progress.skipped(epoch + 1, reason)
        self._warn(self._record.history.epochs)
        self._record.report()

    @property
    def epochs_done(self) -> int:
        """How many epochs are over, in the order in which the trainer comes to them."""
        return len(self._over)

    @property
    def is_validated(self) -> bool:
        """Whether the weights as they are were validated."""
        return self._record.is_validated(self.epochs_done)

    async def validated(self, metrics: dict[str, Any]) -> None:
        """Record a validation of the weights as they are."""
        epoch = self.epochs_done
        if self._record.is_validated(epoch):
            return
        metrics = {**metrics, "epoch": epoch}
        entry = await self._record.add_validation(epoch, metrics, version=self._ledger.line.version)
        self._progress.validated(epoch, entry.metrics)
        self._warn(self._record.history.validations)
        self._record.report()

    async def finish(self, statuses: Sequence[TrainingJobStatus]) -> None:
        """Record the end of the run.

        Raises TrainingError when a job is not over, or its weights could not be adopted.
        """
        for name, epoch in self._epochs.items():
            submission = self._ledger.submission_of(epoch, name)
            if submission is not None and self._record.ended(submission.ref) is None:
                status = await self._ledger.adapter.status(submission.ref)
                if not status.status.is_final:
                    raise TrainingError(
                        f"the trainer returned while job {name} is '{status.status}'. Await "
                        "`trainer_adapter.wait_until_complete(ref)` before `run` returns; resume the run to "
                        "go on"
                    )
        if self.failure is not None:
            raise self.failure
        await self._record.flush()
        summary = summary_of(self._record.history)
        self._record.write_summary(summary)
        self._record.report(final=True)
        self._progress.finished(summary)

    def _warn(self, entries: Sequence[EpochEntry] | Sequence[ValidationEntry]) -> None:
        warn(entries, self._ledger.runtime.run.path, self._progress)

    async def close(self, builder: TrajectoryBuilder, adapter: TrainerAdapter) -> None:
        """Free what the components hold; what one of them raises does not stop the other."""
        try:
            await builder.cleanup()
        finally:
            await adapter.cleanup()

    async def _settle(self, ref: TrainingJobRef, status: TrainingJobStatus) -> None:
        if status.status is TrainingStatusEnum.NOT_FOUND:
            return
        epoch = self._epochs[ref.run_id]
        self._over.add(epoch)
        if status.status is TrainingStatusEnum.COMPLETED:
            try:
                await self._adopt(epoch, ref, status)
            except EtudeError as error:
                self.failure = error
                raise
        await self._ledger.line.noted(ref, status)
        await self._record.log.add_status(ref, status)

    async def _adopt(self, epoch: int, ref: TrainingJobRef, status: TrainingJobStatus) -> None:
        submission = self._ledger.submission_of(epoch, ref.run_id)
        version = await self._ledger.line.adopt(ref, status)
        metrics = {
            **({} if submission is None else submission.metrics),
            "training": (status.metadata or {}).get("metrics", {}),
            "training_seconds": time.monotonic() - self._submitted_at[ref.run_id],
            "model_version": None if version is None else version.number,
        }
        await self._record.add_epoch(
            epoch,
            metrics,
            status=status,
            version=version,
            sampled_from=None if submission is None else submission.sampled_from,
            curriculum_state=None if submission is None else submission.curriculum_state,
        )
        self._ledger.finished(epoch)
        self._progress.trained(epoch + 1, metrics)
        self._warn(self._record.history.epochs)
        self._record.report()
