"""The bookkeeper of a trainer that implements only the interface: it finds out for itself what that does."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from etude.core.errors import EtudeError, RunPaused, RunStopped, TrainingError
from etude.core.implementations import WrongReturnError
from etude.core.job import Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.trajectory import TrajectoryCollection
from etude.loop.bookkeeper import Bookkeeper
from etude.loop.metrics import reason_for_skip
from etude.loop.record import pause_for, require_trained


class Follower(Bookkeeper):
    """Records the epochs of a trainer by what it submits and asks after.

    Such a run is resumed by doing the same again: episodes come from the journal, a job that was submitted
    is not submitted again, and one that ended ends at once, in the same way. Its new weights are adopted
    when the trainer learns that their job is completed.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._epochs: dict[str, int] = {}
        """Of the jobs of this process, by name."""
        self._submitted_at: dict[str, float] = {}
        self._visited: set[int] = set()
        self._over: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._failure: EtudeError | None = None
        """Why data was refused or weights could not be adopted, whatever the trainer made of that."""
        self._is_stopped = False
        """Whether the trainer was told that an alarm has ended the run."""

    async def statuses_of(
        self, run: Callable[[], Awaitable[list[TrainingJobStatus]]]
    ) -> list[TrainingJobStatus]:
        """The statuses of the trainer's jobs, as `run` tells them; as they are recorded, where an alarm has
        ended it."""
        try:
            statuses = await run()
        except Exception:  # A trainer may make another error of RunStopped.
            if not self._is_stopped:
                raise
            statuses = require_trained([self.record.history])
        if self._is_stopped:
            epochs, reason = len(self.record.history.epochs), self.record.reason_to_stop()
            self._progress.message(f"stopped after epoch {epochs}: {reason}")
        return statuses

    async def label_for(self, epoch: int) -> str:
        """Nothing new is collected where an alarm has ended or paused the run."""
        await self._require_going(epoch)
        return await super().label_for(epoch)

    async def _require_going(self, epoch: int) -> None:
        """Raise RunStopped or RunPaused where an alarm asks for it; not in what is only done again."""
        if self.record.is_done(epoch):
            return
        reason = self.record.reason_to_stop()
        if reason is not None:
            self._is_stopped = True
            raise RunStopped(f"the run has ended: {reason}")
        try:
            pause_for(await self.record.take_pauses())
        except RunPaused as pause:
            self._failure = pause
            raise

    async def entered(self, epoch: int, num_epochs: int) -> int:
        """`run_epoch` begins; the number of its epoch: another one where a trainer gives one twice.

        Raises RunStopped or RunPaused where an alarm asks for it.
        """
        if epoch in self._visited:
            epoch = max(self._visited) + 1
        await self._require_going(epoch)
        self._visited.add(epoch)
        if not self.record.is_done(epoch):
            self._progress.epoch_started(epoch + 1, num_epochs)
            self._progress.phase("collecting")
        return epoch

    async def submit(self, collection: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start the job of the epoch, or give back the one that it has."""
        epoch = self.epoch
        try:
            ref = await super().submit(collection)
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
        epoch, recorded, log = self._epochs.get(ref.run_id), self.record.ended(ref), self.record.log
        if recorded is not None:
            if epoch is not None:
                self._over.add(epoch)
                if log.status(ref) is None:
                    await log.add_status(ref, recorded)
            return recorded
        status = self.line.remembered(ref, await ask())
        is_over = status.status.is_final and status.status is not TrainingStatusEnum.NOT_FOUND
        if epoch is not None and is_over:
            self._over.add(epoch)
            if status.status is TrainingStatusEnum.COMPLETED:
                try:
                    await self.adopt(epoch, ref, status, self._submitted_at[ref.run_id])
                except EtudeError as error:
                    self._failure = error
                    raise
                entry = self.record.history.epoch(epoch + 1)
                assert entry is not None
                self.trained(epoch, entry.metrics)
            await self.line.noted(ref, status)
            await log.add_status(ref, status)
        return status

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
            reason = f"run_epoch submitted nothing; {reason_for_skip(await self.metrics(epoch))}"
        await self.skip(epoch, reason)

    @property
    def epochs_done(self) -> int:
        """How many epochs are over, in the order in which the trainer comes to them."""
        return len(self._over)

    async def settled(self, trainer: str, statuses: list[TrainingJobStatus]) -> None:
        """`run` of a trainer of that class has returned these.

        Raises TrainingError when a job is not over, or has not been adopted, and WrongReturnError where there
        are jobs and no statuses.
        """
        for name in self._epochs:
            submission = self.record.log.submission_of(name)
            if submission is not None and self.record.ended(submission.ref) is None:
                status = await self.adapter.status(submission.ref)
                if not status.status.is_final:
                    raise TrainingError(
                        f"the trainer returned while job {name} is '{status.status}'. Await "
                        "`trainer_adapter.wait_until_complete(ref)` before `run` returns; resume the run to "
                        "go on"
                    )
        if self._failure is None:
            pause_for(await self.record.take_pauses())
        if self._failure is not None:
            raise self._failure
        if not statuses and self._epochs and not self._is_stopped:
            raise WrongReturnError(
                f"{trainer}.run returned no status, and {len(self._epochs)} jobs were submitted; return what "
                "`wait_until_complete` says of each, and resume the run"
            )
        await self.record.flush()
