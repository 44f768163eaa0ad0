"""The bookkeeper: records what becomes of each epoch and validation, and adopts new weights."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from etude.core.data_model import finite
from etude.core.errors import EtudeError, TrainingError
from etude.core.history import EpochEntry, History
from etude.core.job import Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.trajectory import TrajectoryCollection
from etude.loop.ledger import Ledger
from etude.loop.metrics import reason_for_skip
from etude.store.facts import SUMMARY
from etude.store.summary import causes_in, shown_cause, summary_of


class Bookkeeper:
    """Records the epochs of one model.

    `EpochTrainer` tells it of each: `adopt`, `skip`, `rest`, `validated`, `finish`. Of a trainer that
    implements only the interface it finds out for itself, since what that submits and asks after comes by
    here (`entered`, `submit`, `followed`, `left`). Such a run is resumed by doing the same again: episodes
    come from the journal, a job that was submitted is not submitted again, and one that ended ends at once,
    in the same way. Its new weights are adopted when the trainer learns that their job is completed.
    """

    def __init__(
        self,
        ledger: Ledger,
        curriculum_state: Callable[[], dict[str, Any]],
        curriculum_facts: Callable[[], dict[str, Any]],
    ) -> None:
        """`curriculum_facts` says what the curriculum has left of the epoch's groups, as metrics."""
        self.ledger = ledger
        self.record = ledger.record
        self._progress = ledger.runtime.progress
        self._curriculum_state = curriculum_state
        self._curriculum_facts = curriculum_facts
        self._epochs: dict[str, int] = {}
        """Of the jobs of this process, by name."""
        self._submitted_at: dict[str, float] = {}
        self._visited: set[int] = set()
        self._over: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._failure: EtudeError | None = None
        """Why data was refused or weights could not be adopted, whatever the trainer made of that."""

    async def adopt(self, epoch: int, ref: TrainingJobRef, status: TrainingJobStatus, since: float) -> None:
        """Have the model sample from the weights that a job made, and record its epoch.

        `since` is when the job began, by `time.monotonic`. Raises TrainingError when the weights are not new.
        """
        submission = self.ledger.submission_of(epoch, ref.run_id)
        version = await self.ledger.line.adopt(ref, status)
        known = await self.ledger.metrics(epoch) if submission is None else submission.metrics
        metrics = {
            **known,
            "training": (status.metadata or {}).get("metrics", {}),
            "training_seconds": time.monotonic() - since,
            "model_version": None if version is None else version.number,
        }
        await self._add_epoch(
            epoch,
            metrics,
            status=status,
            version=self.ledger.line.version,
            sampled_from=None if submission is None else submission.sampled_from,
            curriculum_state=None if submission is None else submission.curriculum_state,
        )

    def trained(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Tell of an epoch that was trained on, and write the metrics files."""
        self._progress.trained(epoch + 1, metrics)
        self.record.warn(self.record.history.epochs)
        self.record.report(output_dir=output_dir)

    async def skip(
        self,
        epoch: int,
        reason: str,
        metrics: dict[str, Any] | None = None,
        curriculum_state: dict[str, Any] | None = None,
    ) -> None:
        """Record that there was nothing to train on; metrics and state are those of now where left out."""
        if metrics is None:
            metrics = {**await self.ledger.metrics(epoch), **self._curriculum_facts()}
        await self._add_epoch(
            epoch,
            metrics,
            skipped=reason,
            version=self.ledger.line.version,
            sampled_from=await self.ledger.sampled_from(epoch),
            curriculum_state=curriculum_state or finite(self._curriculum_state()),
        )
        self._progress.skipped(epoch + 1, self.record.by_name(reason))
        self.record.warn(self.record.history.epochs)
        self.record.report()

    async def rest(self, epoch: int, reason: str) -> None:
        """Record that the model was not meant to be trained in the epoch."""
        await self._add_epoch(
            epoch,
            self.record.with_name({}),
            resting=reason,
            version=self.ledger.line.version,
            curriculum_state=finite(self._curriculum_state()),
        )
        self.record.report()

    async def validated(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Record a validation of the weights as they are, after `epoch` epochs, unless there is one."""
        if self.record.is_validated(epoch):
            return
        entry = await self.record.add_validation(
            epoch, self.record.with_name(metrics), version=self.ledger.line.version
        )
        self._progress.validated(epoch, entry.metrics)
        self.record.warn(self.record.history.validations)
        self.record.report()

    def finish(self) -> None:
        """Record the end of the run."""
        summary = summary_of(self.record.history)
        self.ledger.runtime.run.write_json(SUMMARY, summary)
        self.record.report(final=True)
        self._progress.finished(summary)

    async def _add_epoch(self, epoch: int, metrics: dict[str, Any], **outcome: Any) -> None:
        await self.record.add_epoch(epoch, metrics, **outcome)
        self.ledger.finished(epoch)

    # What a trainer that implements only the interface does, as it comes by.

    def entered(self, epoch: int, num_epochs: int) -> int:
        """`run_epoch` begins; the number of its epoch: another one where a trainer gives one twice."""
        if epoch in self._visited:
            epoch = max(self._visited) + 1
        self._visited.add(epoch)
        if not self.record.is_done(epoch):
            self._progress.epoch_started(epoch + 1, num_epochs)
            self._progress.phase("collecting")
        return epoch

    async def submit(self, collection: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start the job of the epoch, or give back the one that it has."""
        epoch = self.ledger.epoch
        try:
            ref = await self.ledger.submit(
                collection, facts=self._curriculum_facts(), curriculum_state=self._curriculum_state()
            )
        except EtudeError as error:
            self._reasons[epoch], self._failure = str(error), error
            raise
        if isinstance(ref, TrainingJobRef):
            self._epochs[ref.run_id] = epoch
            self._submitted_at.setdefault(ref.run_id, time.monotonic())
            if self.record.ended(ref) is None:
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
        recorded, log = self.record.ended(ref), self.record.log
        if recorded is not None:
            if ref.run_id in self._epochs:
                self._over.add(self._epochs[ref.run_id])
                if log.status(ref) is None:
                    await log.add_status(ref, recorded)
            return recorded
        status = await ask()
        is_over = status.status.is_final and status.status is not TrainingStatusEnum.NOT_FOUND
        if ref.run_id in self._epochs and is_over:
            await self._settle(self._epochs[ref.run_id], ref, status)
        return status

    async def _settle(self, epoch: int, ref: TrainingJobRef, status: TrainingJobStatus) -> None:
        self._over.add(epoch)
        if status.status is TrainingStatusEnum.COMPLETED:
            try:
                await self.adopt(epoch, ref, status, self._submitted_at[ref.run_id])
            except EtudeError as error:
                self._failure = error
                raise
            self.trained(epoch, self.record.metrics_of(epoch))
        await self.ledger.line.noted(ref, status)
        await self.record.log.add_status(ref, status)

    async def left(self, epoch: int, outcome: object) -> None:
        """`run_epoch` is over; without a job there was nothing to train on."""
        if epoch in self._epochs.values():
            await self.record.flush()
            return
        self._over.add(epoch)
        if self.record.is_done(epoch):
            return
        reason = outcome.reason if isinstance(outcome, Skipped) else self._reasons.get(epoch)
        if reason is None:
            metrics = {**await self.ledger.metrics(epoch), **self._curriculum_facts()}
            reason = f"run_epoch submitted nothing; {reason_for_skip(metrics)}"
        await self.skip(epoch, reason)

    @property
    def epochs_done(self) -> int:
        """How many epochs are over, in the order in which the trainer comes to them."""
        return len(self._over)

    async def settled(self) -> None:
        """`run` has returned. Raises TrainingError when a job is not over, or has not been adopted."""
        for name, epoch in self._epochs.items():
            submission = self.ledger.submission_of(epoch, name)
            if submission is not None and self.record.ended(submission.ref) is None:
                status = await self.ledger.adapter.status(submission.ref)
                if not status.status.is_final:
                    raise TrainingError(
                        f"the trainer returned while job {name} is '{status.status}'. Await "
                        "`trainer_adapter.wait_until_complete(ref)` before `run` returns; resume the run to "
                        "go on"
                    )
        if self._failure is not None:
            raise self._failure
        await self.record.flush()


def require_trained(histories: Sequence[History]) -> list[TrainingJobStatus]:
    """The statuses of all jobs, by epoch. Raises TrainingError when there were none."""
    epochs: list[EpochEntry] = [entry for history in histories for entry in history.epochs]
    statuses = [entry.status for entry in sorted(epochs, key=lambda entry: entry.epoch) if entry.status]
    if not statuses:
        reasons = sorted({entry.skipped for entry in epochs if entry.skipped is not None})
        most = max((len(history.epochs) for history in histories), default=0)
        shown = (f"\n  {shown_cause(cause)} (first in {cause['episode']})" for cause in causes_in(epochs))
        causes = "".join(shown)
        raise TrainingError(f"the run trained on nothing in {most} epochs. {' | '.join(reasons)}{causes}")
    return statuses
