"""The job engine: takes the steps of a job, checkpoints them, and goes on after an interruption.

A run's backend `local` runs it in a thread of its process, the server's workers in processes of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import TypeAlias

from etude.core.errors import TrainingError
from etude.core.job import ModelVersion
from etude.jobs.folders import StateFolders
from etude.learner.learner import Learner, TrainingCanceled, has_gradient, is_trained, mean_metrics
from etude.learner.objective import Objective, Unit
from etude.learner.plan import Step, plan_steps
from etude.models.weights import digest

Row: TypeAlias = Sequence[Unit]
"""Units that go into an optimiser step together: those of one line of a file, or a single one."""


class Interrupted(Exception):
    """The job was asked to make way, and goes on from its checkpoint later."""


class JobListener:
    """Is called as a job goes on, in a team of processes the leader's alone; of itself it does nothing."""

    def started(self, done: int) -> None:
        """The job begins, or goes on after `done` steps."""

    def stepped(self, step: Step, metrics: Mapping[str, float]) -> None:
        """A step was taken. At the end of an epoch its metrics have `valid_loss` where that is measured."""

    def checkpointed(
        self, step: Step, version: ModelVersion, metrics: Mapping[str, float]
    ) -> Collection[int]:
        """A checkpoint was written; returns the steps of earlier ones that are to be kept."""
        return ()


@dataclass(frozen=True, slots=True)
class JobData:
    """The data of a job, and the order in which they are learned from."""

    objective: Objective
    rows: Sequence[Row]
    validation: Sequence[Row] = ()
    """Rows whose loss is measured at the end of every epoch."""
    passes: int = 1
    batch_size: int | None = None
    """Rows per optimiser step; None takes all at once."""
    seed: int = 0
    key: tuple[str | int, ...] = ()
    """Tells the shuffling of this job from that of others with the same seed."""

    def plan(self) -> list[Step]:
        """The steps of the job. Raises TrainingError when there is nothing to learn from."""
        if not any(has_gradient(unit) for unit in flat(self.rows)):
            raise TrainingError(
                "there is nothing to learn from: no token has both a weight and an advantage, as where all "
                "rewards of a group are the same"
            )
        counts = has_gradient if self.objective.skips_idle else is_trained
        live = [any(map(counts, row)) for row in self.rows]
        return plan_steps(live, self.passes, self.batch_size, self.seed, *self.key)

    def units(self, step: Step) -> list[Unit]:
        """The units of a step, without those in which no token is trained."""
        return [unit for unit in flat(self.rows[row] for row in step.rows) if is_trained(unit)]


class JobTraining:
    """Trains one job step by step, and can stop and go on after each.

    Every process of the learner's team has one; that of the leader writes, and calls the listener.
    """

    def __init__(
        self,
        learner: Learner,
        data: JobData,
        listener: JobListener,
        checkpoints: StateFolders | None = None,
        checkpoint_steps: int = 1,
    ) -> None:
        """Plan the job, and go to its newest checkpoint.

        `checkpoint_steps` lie between two checkpoints; there is also one after every epoch. Raises
        TrainingError when there is nothing to learn from, StoreError for a checkpoint that cannot be read.
        """
        self._learner = learner
        self._team = learner.team
        self._data = data
        self._listener = listener
        self._checkpoints = checkpoints
        self._checkpoint_steps = checkpoint_steps
        self.steps = data.plan()
        self.history: list[dict[str, float]] = []
        """The metrics of the steps that were taken."""
        if checkpoints is None:
            return
        if self._team.leads:
            checkpoints.delete_drafts()
        if newest := checkpoints.newest():
            self.history = checkpoints.load(newest, learner)["metrics"]

    def run(self, canceled: Event, stopping: Event | None = None) -> dict[str, float]:
        """Take the steps that are left; the mean of all steps' metrics.

        The weights in memory change as it goes: after an error they are between two versions. Raises
        TrainingCanceled when `canceled` is set, Interrupted when `stopping` is, after a checkpoint.
        """
        if self._team.leads:
            self._listener.started(len(self.history))
        for step in self.steps[len(self.history) :]:
            metrics = self._take(step, canceled)
            self.history.append(metrics)
            if self._team.leads:
                self._listener.stepped(step, metrics)
            interrupted = self._team.any(stopping is not None and stopping.is_set())
            if interrupted or step.ends_epoch or step.number % self._checkpoint_steps == 0:
                self._checkpoint(step, metrics)
            if interrupted:
                raise Interrupted
        self._learner.end_training()
        return mean_metrics(self.history)

    def _take(self, step: Step, canceled: Event) -> dict[str, float]:
        objective = self._data.objective
        try:
            metrics = self._learner.take_step(self._data.units(step), objective, step.part, canceled)
        except TrainingCanceled as error:
            raise TrainingCanceled(f"canceled after {step.number - 1} of {step.of} steps") from error
        if self._data.validation and step.ends_epoch:
            held_out = list(flat(self._data.validation))
            metrics["valid_loss"] = self._learner.evaluate(held_out, objective)["loss"]
        return metrics

    def _checkpoint(self, step: Step, metrics: Mapping[str, float]) -> None:
        if self._checkpoints is None:
            return
        learner, team = self._learner, self._team
        if team.size > 1 and not team.shards and not team.same(digest(learner.policy.trainable())):
            raise TrainingError(
                f"after step {step.number} the processes hold different weights; are their devices of one "
                "kind? Start the server with --training-processes 1"
            )
        state = learner.snapshot()
        if team.leads:
            version = self._checkpoints.write(step.number, {"metrics": self.history}, learner, state)
            kept = self._listener.checkpointed(step, version, metrics)
            self._checkpoints.prune({*kept, step.number})


def flat(rows: Iterable[Row]) -> Iterable[Unit]:
    """The units of all rows."""
    return (unit for row in rows for unit in row)
