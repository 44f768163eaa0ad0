"""A job of the adapter `local`, trained by the same code in the run's process and on a cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from etude.algorithms.algorithm import Algorithm
from etude.backends.capabilities import LocalAdapterConfig
from etude.backends.version_writer import MadeVersion, VersionWriter
from etude.config.finetuning import FinetuneConfig
from etude.core.edge import TrajectoryCollection
from etude.core.errors import TrainingError
from etude.core.job import ModelVersion
from etude.core.sample import SampleOrPair
from etude.jobs.folders import JobContent, StateFolders
from etude.jobs.training import JobData, JobListener, JobTraining
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.objective import Witness, is_trained
from etude.learner.optimiser import Schedule, Step
from etude.models.memory import give_back_freed
from etude.models.policy import Policy
from etude.store.files import write_atomically
from etude.store.learned import Source, learned_lines


class FinishedJob(BaseModel, frozen=True):
    """A job that is over, as it is stored with the version that it made."""

    job: str
    """Its name."""
    version: ModelVersion
    metrics: dict[str, float]
    content: JobContent
    """Its start is the number of a version."""

    @classmethod
    def read(cls, versions: StateFolders, number: int) -> FinishedJob:
        """The job that made a version. Raises StoreError where the folder is not as it was written."""
        return cls.model_validate(versions.facts(number))


@dataclass(slots=True)
class Job(JobListener):
    """A job of the adapter's, which listens to its training in the run's own process."""

    name: str
    algorithm: Algorithm
    config: LocalAdapterConfig
    collection: TrajectoryCollection
    groups: list[list[SampleOrPair]]
    content: JobContent
    """Without its start, which is known once it trains."""
    seed: int
    number: int = 0
    """Of the version that it makes, once it trains."""
    at_once: bool = True
    """Whether its version is on the disk when it is over."""
    canceled: threading.Event = field(default_factory=threading.Event)
    progress: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    news: str | None = None
    """The last that became of it, beside its steps."""
    task: asyncio.Task[FinishedJob] | None = None

    def stepped(self, step: Step, metrics: Mapping[str, float]) -> None:
        self.metrics, self.progress = dict(metrics), 100.0 * step.number / step.of

    def train(
        self,
        learner: Learner,
        listener: JobListener,
        canceled: threading.Event,
        stopping: threading.Event | None = None,
        checkpoints: StateFolders | None = None,
    ) -> MadeVersion:
        """Take all steps, from the newest of the checkpoints on; the version that it has made of the
        learner's weights. All of a team must call it together.

        Raises TrainingError, TrainingCanceled when `canceled` is set, and Interrupted when `stopping` is.
        """
        units, facts = self.algorithm.units(self.groups, learner.divergences)
        learner.witness = witness = Witness() if self.config.record_ratios else None
        data = JobData(
            self.algorithm,
            rows=[(unit,) for unit in units if is_trained(unit)],
            passes=self.config.passes,
            batch_size=self.config.batch_size,
            seed=self.seed,
            key=("pass", learner.step),
        )
        every = self.config.checkpoint_steps
        training = JobTraining(learner, data, listener, checkpoints, every, keeps_epochs=False)
        try:
            metrics = training.run(canceled, stopping) | facts
        finally:
            learner.witness = None
        seen = {} if witness is None else witness.seen
        learned = partial(learned_lines, Source(self.name, version=self.number), units, seen)
        finished = {"job": self.name, "metrics": metrics, "content": asdict(self.content)}
        return MadeVersion(self.number, finished, learned, learner.snapshot())


def learner_options(config: LocalAdapterConfig, run: FinetuneConfig) -> LearnerOptions:
    """How the config takes optimiser steps in a run, of whose epochs each is one training."""
    epochs = 1 if run.fine_tune_from_scratch else run.num_epochs
    return LearnerOptions(
        learning_rate=config.rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        schedule=Schedule(config.lr_schedule, config.warmup_steps, epochs),
        token_budget=config.token_budget,
        packing=config.packing,
        gradient_checkpointing=config.gradient_checkpointing,
    )


def failure(error: RuntimeError) -> TrainingError:
    """The error of a job for one of torch's."""
    # torch says itself what to do about an operation that a device does not have.
    lacks = isinstance(error, NotImplementedError)
    hint = "" if lacks else "; if memory ran out, lower token_budget of the adapter"
    return TrainingError(f"training failed: {error}{hint}")


class LocalLearner:
    """A workplace in a thread. A killed job leaves nothing behind, and is trained again from its start."""

    def __init__(
        self,
        policy: Policy,
        versions: StateFolders,
        run: FinetuneConfig,
        options: LearnerOptions,
        checkpoint_seconds: float | None = None,
    ) -> None:
        """`checkpoint_seconds` are those of `LocalAdapterConfig`.

        Raises RequestError for options that do not go with the policy's model.
        """
        self._policy = policy
        self._versions = versions
        self._run = run
        self.learner = Learner(policy, options)
        self._writer = VersionWriter(versions, checkpoint_seconds)
        self._optimiser_of = 0
        """The version that the optimiser's state belongs to; engines adopt versions on their own."""
        self._begins_from = 0
        """The version whose optimiser has taken no step: the base, or what a warm-up made."""

    @property
    def note(self) -> str | None:
        """Why tokens that sequences share are computed for each of them."""
        return self.learner.note

    async def train(self, job: Job, start: ModelVersion) -> FinishedJob:
        """Train the job, in a thread with the policy's lock held, from the weights `start`, which are the
        policy's.

        The policy then has its version. Raises EtudeError; all is as it was where `start` was written.
        """
        return await asyncio.to_thread(self._train, job, start)

    def go_to(self, number: int) -> None:
        """Put the optimiser to where it was when a version was made."""
        if self._optimiser_of != number:
            self._take_optimiser_of(number)

    def keep(self) -> None:
        """Have the last version written, beside what goes on."""
        with self._policy.lock:
            self._writer.write_behind()

    def close(self) -> None:
        """Have the last version on the disk."""
        with self._policy.lock:
            self._writer.close()

    def begin_from(self, version: ModelVersion) -> None:
        """Forget the optimiser's steps up to that version."""
        self._begins_from = version.number
        if self._optimiser_of == version.number:
            self._take_optimiser_of(version.number)

    def _train(self, job: Job, start: ModelVersion) -> FinishedJob:
        learner, policy, number = self.learner, self._policy, job.number
        for sampler in [*policy.samplers]:
            sampler.rest()
        with policy.lock:
            self.go_to(start.number)
            learner.options = learner_options(job.config, self._run)
            self._writer.drop()
            try:
                made = job.train(learner, job, job.canceled)
                written = self._writer.add(made, at_once=job.at_once)
            except BaseException as error:
                self._restore(start)
                if isinstance(error, RuntimeError):
                    raise failure(error) from error
                raise
            finally:
                job.groups = []  # They are no longer needed once the job is over.
            self._optimiser_of = number
            policy.mark_changed(number, None if written is None else written.digest)
            if written is None:
                location = str(self._versions.folder(number))
                written = ModelVersion(number=number, location=location, digest=policy.digest())
        give_back_freed()
        return FinishedJob.model_validate({**made.facts, "version": written})

    def _restore(self, start: ModelVersion) -> None:
        """Put weights and optimiser to where they were before a job that failed.

        Where `start` was not written there is nothing to go back to but by resuming the run, which makes it
        again.
        """
        self._policy.mark_changed(start.number)  # Whatever they are: `adopt` compares them.
        self._writer.drop()
        self._writer.settle()
        if not start.number or self._versions.folder(start.number).exists():
            self._policy.adopt(start)
            self._take_optimiser_of(start.number)

    def _take_optimiser_of(self, number: int) -> None:
        if number > self._begins_from:
            self.learner.restore(self._versions.folder(number))
        else:
            self.learner.reset()
        self._optimiser_of = number


ORDER, _NEWS = "order.json", "news.json"


class LearningOrder(BaseModel):
    """All that a job is made of: a file in its folder. It has no secrets."""

    model_config = ConfigDict(frozen=True)

    job: str
    number: int
    """Of the version that it makes."""
    versions: Path
    """The folder of all versions."""
    model: str
    device: str
    dtype: str
    """Of the weights that the agents sample from."""
    seed: int
    start: ModelVersion
    begins_from: ModelVersion | None
    """The version that a warm-up made, which training begins with in place of the base model."""
    config: LocalAdapterConfig
    options: LearnerOptions
    algorithm: str
    """The import path of its class."""
    gradient: dict[str, Any]
    """The options of its gradient."""
    content: JobContent
    collection: TrajectoryCollection


class JobNews(BaseModel):
    """All that the processes of a job have said of it: a file in its folder."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    step: int = 0
    """The last step that was taken."""
    of: int = 0
    metrics: dict[str, float] = {}
    note: str | None = None
    """Something that a person should know once the job is done."""
    failure: str | None = None
    """Why the job has failed, if it has."""

    @classmethod
    def read(cls, folder: Path) -> JobNews:
        """The news of the job in a folder."""
        with suppress(FileNotFoundError):
            return cls.model_validate_json((folder / _NEWS).read_text(encoding="utf-8"))
        return cls()

    def write(self, folder: Path) -> None:
        """Put them in the place of what was said before. Raises StoreError."""
        write_atomically(folder / _NEWS, self.model_dump_json())


class JobDesk:
    """The head's end of the line on which processes say how their job goes."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._turn = threading.Lock()

    def tell(self, **news: Any) -> None:
        """Note fields of JobNews; of several failures the one that came first counts."""
        with self._turn:
            known = JobNews.read(self._folder)
            first = {} if known.failure is None else {"failure": known.failure}
            known.model_copy(update=news | first).write(self._folder)
