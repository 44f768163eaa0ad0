"""A training job, step by step, in one process or several: its data, news, checkpoints and memory.

Also the jobs of the adapter `local`, and the learner that trains them in the run's process.
"""

from __future__ import annotations

import asyncio
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from threading import Event
from typing import Literal, TypeAlias

from pydantic import BaseModel
from torch import OutOfMemoryError

from etude.algorithms.algorithm import Algorithm
from etude.backends.state_folders import JobContent, MadeVersion, StateFolders, VersionWriter
from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.config.import_path import where_raised
from etude.core.errors import EtudeError, TrainingError, first_line
from etude.core.job import ModelVersion
from etude.core.sample import SampleOrPair, TrajectoryCollection, Unit, has_gradient, is_trained
from etude.learner.learner import Learner, LearnerOptions, TrainingCanceled
from etude.learner.objective import Objective
from etude.learner.optimiser import Schedule, Step, plan_steps
from etude.models.device import available_memory, release_freed_memory, release_threads, shown_bytes
from etude.models.policy import Policy
from etude.models.weights import load_tensors
from etude.store.files import WEIGHTS_FILE, delete_left_over


class TooLittleMemory(TrainingError):
    """A step would take more memory than is free."""


def training_error(error: Exception) -> EtudeError:
    """Return a job's error for any error, with the place in a user's code; Etude's own are returned as is."""
    if isinstance(error, EtudeError):
        return error
    if isinstance(error, OutOfMemoryError):
        return TooLittleMemory(
            f"memory ran out: {first_line(error)}; lower token_budget or batch_size, set "
            "gradient_checkpointing, or train LoRA weights"
        )
    return TrainingError(f"training failed: {where_raised(error)}")


def require_room(learner: Learner) -> None:
    """Raise TooLittleMemory if gradients and AdamW's moments take more memory than is free.

    Processes on one machine or GPU add up their needs. All processes of a team must call this together.
    """
    team, device = learner.team, next(learner.policy.model.parameters()).device
    place, free = f"{platform.node()}/{device}", available_memory(str(device))
    needed = int(team.sum({place: learner.optimiser.bytes_to_come})[place])
    is_short = free is not None and needed > free
    if not team.any(is_short):
        return
    if free is not None and is_short:
        raise TooLittleMemory(
            f"gradients and the optimiser's state take {shown_bytes(needed)} of memory beside the weights, "
            f"and {shown_bytes(free)} are free on {device} of {platform.node()}; train LoRA weights, or free "
            "some memory"
        )
    raise TooLittleMemory("another process of the job has too little memory")


Row: TypeAlias = Sequence[Unit]
"""Units that must be in one optimiser step: all units of one line of a file, or a single unit."""


class Interrupted(Exception):
    """The job was asked to stop, and resumes from its checkpoint later."""


class News(BaseModel, frozen=True):
    """A report about a job. `ended` is about its processes, which ended early; `done` and `failed` end it.

    `went_back` says that the job goes on after an earlier `step`, because later checkpoints are damaged.
    """

    kind: Literal["started", "stepped", "went_back", "ended", "done", "failed"]
    step: int = 0
    """The step that was taken, or after which the job starts or goes on."""
    of: int = 0
    epoch: int = 0
    metrics: dict[str, float] = {}
    message: str = ""
    """The damage, the cause of an end or failure, or a note for the user."""
    code: str = ""
    """The kind of failure."""
    digest: str = ""
    """Hash of the new weights."""
    trained_tokens: int = 0

    @property
    def is_end(self) -> bool:
        """Whether the job has ended."""
        return self.kind in ("done", "failed")

    @property
    def goes_on(self) -> str:
        """Where the job goes on, in words."""
        return f"continues from step {self.step}" if self.step else "begins anew"


Tell: TypeAlias = Callable[[News], None]
"""Takes the news of a job. Only the leader of a team calls it."""


@dataclass(frozen=True, slots=True)
class JobData:
    """The data of a job, with their order in training."""

    objective: Objective
    rows: Sequence[Row]
    validation: Sequence[Row] = ()
    """Rows whose loss is measured at the end of every epoch."""
    passes: int = 1
    batch_size: int | None = None
    """Rows per optimiser step. None takes all at once."""
    seed: int = 0
    key: tuple[str | int, ...] = ()
    """Separates this job's shuffling from other jobs with the same seed."""

    def plan(self) -> list[Step]:
        """Return the steps of the job. Raises TrainingError if there is nothing to learn from."""
        counts = has_gradient if self.objective.skips_idle else is_trained
        if not any(map(counts, chain.from_iterable(self.rows))):
            raise TrainingError(
                "there is nothing to learn from: no token has both a weight and an advantage, for "
                "example because all rewards of a group are equal"
            )
        live = [any(map(counts, row)) for row in self.rows]
        return plan_steps(live, self.passes, self.batch_size, self.seed, *self.key)

    def units(self, step: Step) -> list[Unit]:
        """Return the units of a step, except those without a trained token."""
        return [unit for row in step.rows for unit in self.rows[row] if is_trained(unit)]

    def measure(self, step: Step, learner: Learner) -> dict[str, float]:
        """Return further metrics after a step: `valid_loss` at the end of an epoch."""
        units = [*chain.from_iterable(self.validation)] if step.ends_epoch else []
        if not any(map(is_trained, units)):
            return {}
        return {"valid_loss": learner.evaluate(units, self.objective)["loss"]}


class JobTraining:
    """One job's training, step by step. It can stop and resume after each step.

    Every process of the learner's team has one. Only the leader writes and tells.
    """

    def __init__(
        self,
        learner: Learner,
        data: JobData,
        tell: Tell,
        checkpoints: StateFolders | None = None,
        checkpoint_steps: int = 1,
    ) -> None:
        """Plan the job, and load its newest undamaged checkpoint.

        A checkpoint follows every `checkpoint_steps` steps, except the last step, whose weights the caller
        keeps. Raises TrainingError if there is nothing to learn from, StoreError for a checkpoint that does
        not fit.
        """
        self._learner = learner
        self._team = learner.team
        self._data = data
        self._tell = tell
        self._checkpoints = checkpoints
        self._checkpoint_steps = checkpoint_steps
        self.steps = data.plan()
        self.history: list[dict[str, float]] = []
        """The metrics of the taken steps."""
        learner.begin_training(
            [*chain.from_iterable(data.rows)] if len(self.steps) > 1 else (), data.objective
        )
        if checkpoints is None:
            return
        newest, damage = 0, list[str]()
        for number in reversed(checkpoints.numbers()):
            if not (clauses := checkpoints.damage(number)):
                newest = number
                break
            damage += clauses
        # Waits until all processes have looked, before the leader changes anything.
        self._team.any(bool(damage))
        if self._team.leads:
            delete_left_over(checkpoints.root)
            if damage:
                checkpoints.prune([number for number in checkpoints.numbers() if number <= newest])
                tell(News(kind="went_back", step=newest, message="; ".join(damage)))
        if newest:
            folder = checkpoints.folder(newest)
            learner.policy.load_tensors(load_tensors(folder / WEIGHTS_FILE))
            learner.restore(folder)
            self.history = checkpoints.facts(newest)["metrics"]

    def run(self, canceled: Event, stopping: Event | None = None) -> dict[str, float]:
        """Take the remaining steps. Return the mean metrics of all steps.

        `mismatch_kl` is `sampled_kl` before the first change. It compares the learner with the engine if the
        engine sampled from the same weights.

        The weights in memory change meanwhile. After an error they are between two versions. Raises
        TrainingCanceled when `canceled` is set. Raises Interrupted, after a checkpoint, when `stopping` is
        set. Raises TooLittleMemory before the first step if the optimiser's state does not fit.
        """
        require_room(self._learner)
        if self._team.leads:
            self._tell(News(kind="started", step=len(self.history)))
        for step in self.steps[len(self.history) :]:
            metrics = self._take(step, canceled)
            self.history.append(metrics)
            if self._team.leads:
                finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
                facts = {"step": step.number, "of": step.of, "epoch": step.epoch, "metrics": finite}
                self._tell(News(kind="stepped", **facts))
            interrupted = self._team.any(stopping is not None and stopping.is_set())
            is_due = step.number % self._checkpoint_steps == 0 and step.number < step.of
            if self._checkpoints is not None and (interrupted or is_due):
                state = self._learner.snapshot()
                if self._team.leads:
                    self._checkpoints.write(step.number, {"metrics": self.history}, state)
                    # The previous checkpoint stays too, to resume from if this one is damaged.
                    self._checkpoints.prune(self._checkpoints.numbers()[-2:])
            if interrupted:
                raise Interrupted
        self._learner.end_training()
        names = sorted({name for metrics in self.history for name in metrics})
        count, first = len(self.history), self.history[0].get("sampled_kl")
        means = {name: sum(metrics.get(name, 0.0) for metrics in self.history) / count for name in names}
        return means if first is None else {**means, "mismatch_kl": first}

    def _take(self, step: Step, canceled: Event) -> dict[str, float]:
        try:
            units = self._data.units(step)
            metrics = self._learner.take_step(units, self._data.objective, step.part, canceled)
            return metrics | self._data.measure(step, self._learner)
        except TrainingCanceled as error:
            raise TrainingCanceled(f"canceled after {step.number - 1} of {step.of} steps") from error


class FinishedJob(BaseModel, frozen=True):
    """A finished job, as it is stored with the version that it made."""

    job: str
    """The job's name."""
    version: ModelVersion
    metrics: dict[str, float]
    content: JobContent
    """Its `start` is a version number."""


@dataclass(slots=True)
class Job:
    """A job of the adapter, which tracks its own progress when it trains in the run's process."""

    name: str
    algorithm: Algorithm
    config: LocalAdapterConfig
    collection: TrajectoryCollection
    groups: list[list[SampleOrPair]]
    content: JobContent
    """Without `start`, which is known once the job trains."""
    seed: int
    number: int = 0
    """The number of the version that it makes, set when it trains."""
    at_once: bool = True
    """Whether its version is on disk when the job ends."""
    canceled: Event = field(default_factory=Event)
    progress: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    news: str | None = None
    """The latest message about the job, besides its steps."""
    task: asyncio.Task[FinishedJob] | None = None

    def take(self, news: News) -> None:
        """Take the progress of a step."""
        if news.kind == "stepped":
            self.metrics, self.progress = news.metrics, 100.0 * news.step / news.of

    def train(
        self,
        learner: Learner,
        tell: Tell,
        canceled: Event,
        stopping: Event | None = None,
        checkpoints: StateFolders | None = None,
    ) -> MadeVersion:
        """Take all steps, starting from the newest checkpoint. Return the version made of the learner's
        weights. All processes of a team must call this together.

        Raises TrainingError, TrainingCanceled when `canceled` is set, and Interrupted when `stopping` is set.
        """
        data = JobData(
            self.algorithm,
            rows=[(unit,) for unit in self.algorithm.units(self.groups) if is_trained(unit)],
            passes=self.config.passes,
            batch_size=self.config.batch_size,
            seed=self.seed,
            key=("pass", learner.step),
        )
        training = JobTraining(learner, data, tell, checkpoints, self.config.checkpoint_steps)
        metrics = training.run(canceled, stopping)
        finished = {"job": self.name, "metrics": metrics, "content": asdict(self.content)}
        return MadeVersion(self.number, finished, learner.snapshot())


def learner_options(config: LocalAdapterConfig, run: FinetuneConfig) -> LearnerOptions:
    """Return the options for optimiser steps in a run. Each epoch of the run is one training."""
    epochs = 1 if run.fine_tune_from_scratch else run.num_epochs
    return LearnerOptions(
        learning_rate=config.rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        schedule=Schedule(config.lr_schedule, config.warmup_steps, epochs),
        token_budget=config.token_budget,
        gradient_checkpointing=config.gradient_checkpointing,
    )


class LocalLearner:
    """A trainer of jobs in a thread. A killed job leaves nothing behind, and restarts from its beginning."""

    def __init__(
        self,
        policy: Policy,
        versions: StateFolders,
        run: FinetuneConfig,
        options: LearnerOptions,
        checkpoint_seconds: float | None = None,
    ) -> None:
        """`checkpoint_seconds` is the key of `LocalAdapterConfig`.

        Raises RequestError for options that the policy's model does not support.
        """
        self._policy = policy
        self._versions = versions
        self._run = run
        self.learner = Learner(policy, options)
        self._writer = VersionWriter(versions, checkpoint_seconds)
        self._optimiser_of = 0
        """The version that the optimiser state belongs to. Engines adopt versions independently."""
        self._begins_from = 0
        """The version whose optimiser has taken no step: the base model, or a warm-up's version."""

    @property
    def note(self) -> str | None:
        """A message about how the learner computes, such as why layers are computed twice."""
        return self.learner.note

    async def train(self, job: Job, start: ModelVersion) -> FinishedJob:
        """Train the job in a thread, with the policy's lock held. The policy must have the weights of
        `start`.

        Then the policy has the new version. Raises EtudeError, with the old state restored if `start` was
        written.
        """
        return await asyncio.to_thread(self._train, job, start)

    def go_to(self, number: int) -> None:
        """Restore the optimiser state of a version."""
        if self._optimiser_of != number:
            self._take_optimiser(number)

    def keep(self) -> None:
        """Write the last version in the background."""
        with self._policy.lock:
            self._writer.write_behind()

    def close(self) -> None:
        """Write the last version to disk."""
        with self._policy.lock:
            self._writer.close()

    def begin_from(self, version: ModelVersion) -> None:
        """Restart the optimiser at this version, without its earlier steps."""
        self._begins_from = version.number
        if self._optimiser_of == version.number:
            self._take_optimiser(version.number)

    def _train(self, job: Job, start: ModelVersion) -> FinishedJob:
        learner, policy, number = self.learner, self._policy, job.number
        for sampler in [*policy.samplers]:
            sampler.free_sampling_memory()
        with policy.lock:
            self.go_to(start.number)
            learner.options = learner_options(job.config, self._run)
            self._writer.drop()
            try:
                made = job.train(learner, job.take, job.canceled)
                written = self._writer.add(made, at_once=job.at_once)
            except BaseException as error:
                self._restore(start)
                if isinstance(error, Exception) and not isinstance(error, EtudeError):
                    raise training_error(error) from error
                raise
            finally:
                job.groups = []  # They are not needed after the job.
            self._optimiser_of = number
            policy.mark_changed(number, None if written is None else written.digest)
            if written is None:
                location = str(self._versions.folder(number))
                written = ModelVersion(number=number, location=location, digest=policy.digest())
        release_freed_memory()
        release_threads()
        return FinishedJob.model_validate({**made.facts, "version": written})

    def _restore(self, start: ModelVersion) -> None:
        """Restore weights and optimiser to their state before a failed job.

        If `start` was not written, this is impossible. Resuming the run then makes it again.
        """
        self._policy.mark_changed(start.number)  # The weights are unknown, so `adopt` compares them.
        self._writer.drop()
        self._writer.settle()
        if not start.number or self._versions.folder(start.number).exists():
            self._policy.adopt(start)
            self._take_optimiser(start.number)

    def _take_optimiser(self, number: int) -> None:
        if number > self._begins_from:
            self.learner.restore(self._versions.folder(number))
        else:
            self.learner.reset()
        self._optimiser_of = number
