"""A job of the adapter `local`, its training in the run's process, and the writing of its version.

Versions are written in the background: only some of them, but always the last. One that was not written is
made again from the previous one, on the journalled episodes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import BaseModel

from etude.algorithms.algorithm import Algorithm
from etude.backends.job_training import JobData, JobTraining, News, Tell, training_error
from etude.backends.state_folders import JobContent, StateFolders
from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.core.conversion import TrajectoryCollection
from etude.core.job import ModelVersion
from etude.core.sample import SampleOrPair, is_trained
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.optimiser import Schedule, Snapshot
from etude.models.device import available_memory, release_freed_memory, shown_bytes
from etude.models.policy import Policy

_LOG = logging.getLogger("etude.versions")

_SECONDS = 60.0
"""The default number of seconds between two written versions, if they are large."""
_LARGE = 64_000_000
"""In bytes. Smaller versions, as of nearly all LoRA weights, are written in a tenth of a second."""


class FinishedJob(BaseModel, frozen=True):
    """A finished job, as it is stored with the version that it made."""

    job: str
    """The job's name."""
    version: ModelVersion
    metrics: dict[str, float]
    content: JobContent
    """Its `start` is a version number."""


@dataclass(frozen=True, slots=True)
class MadeVersion:
    """A version that a job has made, with the data to write."""

    number: int
    facts: Mapping[str, Any]
    """Facts about the job."""
    state: Snapshot


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
    canceled: threading.Event = field(default_factory=threading.Event)
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
        canceled: threading.Event,
        stopping: threading.Event | None = None,
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


class VersionWriter:
    """A thread that writes a model's versions while the next episodes are collected.

    Call its methods from one thread at a time, with the policy's lock held. The next call raises the errors
    of earlier writes.
    """

    def __init__(self, versions: StateFolders, seconds: float | None) -> None:
        """`seconds` is the time between two written versions. 0 writes each, None means 60 for large ones."""
        self._versions = versions
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="versions")
        self._going_on: list[Future[Any]] = []
        self._unwritten: MadeVersion | None = None
        """The last version. Its tensors are the ones that the next step changes."""
        self._since = time.monotonic()

    def add(self, made: MadeVersion, *, at_once: bool) -> ModelVersion | None:
        """Take a new version. Return it as written, or None if it is not written yet.

        With `at_once`, it is on disk when this returns. Raises StoreError.
        """
        self.settle(waits=False)
        self._unwritten = made
        seconds = self._seconds
        if seconds is None:
            seconds = _SECONDS if made.state.size > _LARGE else 0.0
        if at_once or not seconds:
            return self.flush()
        if time.monotonic() - self._since >= seconds:
            self.write_behind()
        return None

    def write_behind(self) -> None:
        """Write the last version in the background, from a copy, unless it is already written.

        Without enough memory for a copy, it is on disk when this returns. Raises StoreError.
        """
        self.settle(waits=False)
        if (made := self._unwritten) is None:
            return
        free = available_memory()
        if free is not None and 2 * made.state.size > free:
            size = shown_bytes(made.state.size)
            _LOG.warning(
                "version %d is written in place: there is no room for a copy (%s)", made.number, size
            )
            self.flush()
            return
        self._going_on.append(
            self._thread.submit(self._versions.write, made.number, made.facts, made.state.copied())
        )
        self._unwritten, self._since = None, time.monotonic()

    def flush(self) -> ModelVersion | None:
        """Write the last version to disk now. Return it, or None if it was written. Raises StoreError."""
        self.settle()
        if (made := self._unwritten) is None:
            return None
        self._unwritten, self._since = None, time.monotonic()
        return self._versions.write(made.number, made.facts, made.state)

    def drop(self) -> None:
        """Forget the last version if it is not written, because its weights are about to change."""
        self._unwritten = None

    def settle(self, *, waits: bool = True) -> None:
        """Wait for running writes, or with `waits=False` check finished ones only. Raises StoreError."""
        over = [each for each in self._going_on if waits or each.done()]
        self._going_on = [each for each in self._going_on if each not in over]
        for each in over:
            each.result()

    def close(self) -> None:
        """Write the last version, and stop the thread. Raises StoreError."""
        with ExitStack() as steps:
            steps.callback(self._thread.shutdown)
            steps.callback(self.flush)  # Also after an earlier version could not be written.
            self.settle()


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
                if isinstance(error, RuntimeError):
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
