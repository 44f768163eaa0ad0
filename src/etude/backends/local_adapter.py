"""The local backend: jobs run in a thread, versions are folders of the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.algorithms.algorithm import Algorithm
from etude.backends.capabilities import EVERY_KIND, Capabilities
from etude.backends.hyperparameters import JobHyperparameters
from etude.backends.job_content import JobContent, data_hash
from etude.backends.job_log import JobLog
from etude.backends.job_status import job_status
from etude.backends.local_config import LocalAdapterConfig, LoraConfig
from etude.backends.local_training import (
    algorithm_for,
    for_algorithm,
    hyperparameters_of,
    learner_options,
    lora_with,
    units_of,
)
from etude.backends.trainer_adapter import TrainerAdapter
from etude.backends.versions import FinishedJob, VersionFolders
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import CapabilityError, RequestError, TrainingError
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.keys import fold
from etude.core.sample import Unit
from etude.core.trajectory import TrajectoryCollection
from etude.learner.learner import Learner, StepReport, TrainingCanceled
from etude.models.policy import LoraOptions, Policy


@dataclass(slots=True)
class _Job:
    """A job of this process."""

    task: asyncio.Task[FinishedJob]
    content: JobContent
    """Without its start, which is known when it is over."""
    canceled: threading.Event = field(default_factory=threading.Event)
    progress: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Order:
    """What a job is to train on, and how."""

    name: str
    algorithm: Algorithm
    config: LocalAdapterConfig
    groups: list[list[Unit]]
    content: JobContent


class LocalAdapter(TrainerAdapter):
    """Trains the policy that the engine samples from, and keeps every version in the run folder.

    With `collect_ahead` it trains a twin of that policy, whose trained tensors are in memory once more.
    A version's folder appears by one rename, with the weights, the optimiser's state and the job that
    made it. A killed job leaves nothing behind and is trained again from the version before it.
    """

    adapter_config: LocalAdapterConfig

    def __init__(self, adapter_config: LocalAdapterConfig, policy: Policy, folder: Path, seed: int) -> None:
        super().__init__(adapter_config)
        self._policy = policy
        self._versions = VersionFolders(folder)
        self._seed = seed
        self._newest = 0
        """The highest version that is known: a job makes one after it, wherever it starts."""
        self._optimiser_of = 0
        """The version that the optimiser's state belongs to; engines adopt versions on their own."""
        self._jobs: dict[str, _Job] = {}
        self._learner: Learner | None = None
        self._hyperparameters = JobHyperparameters()

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Put LoRA weights on the model where the config asks for them, and make the optimiser."""
        await super().initialize(run_config)
        lora = lora_with(self.adapter_config, self._hyperparameters)
        if lora is not None:
            modules = tuple(lora.target_modules) if lora.target_modules else None
            try:
                self._policy.use_lora(LoraOptions(lora.r, lora.alpha, modules), fold(self._seed, "lora"))
            except ValueError as error:
                raise RequestError(f"LoRA weights do not fit this model: {error}") from error
        self._versions.delete_drafts()
        self._policy.keep_base()
        if run_config.collect_ahead:
            # The engine samples from the weights as they were, until it adopts those that are made here.
            self._policy = await asyncio.to_thread(self._policy.twin)
        options = learner_options(self.adapter_config, run_config)
        self._learner = Learner(self._policy, options, self._seed)

    def capabilities(self) -> Capabilities:
        """All algorithms, a user's too, on token ids."""
        return Capabilities(token_ids_for=EVERY_KIND, versions=True, from_base=True)

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """See `TrainerAdapter.use_hyperparameters`. LoRA weights are put on the model by `initialize`."""
        before = lora_with(self.adapter_config, self._hyperparameters)
        after = lora_with(self.adapter_config, hyperparameters)
        if self._learner is not None and before != after:
            raise CapabilityError(
                f"the model trains {_lora_words(before)} since the adapter was initialized, and cannot train "
                f"{_lora_words(after)}: make the group (lora_rank, lora_alpha_scale) before "
                "`adapter.initialize`, or set 'lora' in the adapter's config"
            )
        self._hyperparameters = hyperparameters

    async def is_healthy(self) -> bool:
        """Whether `initialize` has been called: there is nothing else that could be away."""
        return self._learner is not None

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Start training in a thread. See `TrainerAdapter.submit`."""
        name = trajectories.run_id
        ref = TrainingJobRef(run_id=name, backend="local")
        learner, algorithm = self._require_learner(), algorithm_for(trajectories, self._hyperparameters)
        config = for_algorithm(algorithm, self.adapter_config, self._hyperparameters)
        facts = hyperparameters_of(algorithm, config, learner.options.schedule, self._seed)
        content = JobContent.of(data_hash(trajectories), trajectories.method, facts)
        if (running := self._jobs.get(name)) is not None:
            running.content.require(name, content)
        if (finished := self._versions.of_job(name)) is not None:
            number = str(finished.version.number)
            finished.content.require(name, replace(content, start=str(self._policy.version)), number)
        if running is not None or finished is not None:
            return ref
        # Made before the job starts, so that data which cannot be trained on is an error here.
        groups = units_of(trajectories, algorithm, self._policy.template)
        order = _Order(name, algorithm, config, groups, content)
        canceled = threading.Event()
        task = asyncio.create_task(asyncio.to_thread(self._train, order, canceled))
        self._jobs[name] = _Job(task, content, canceled)
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where the job stands; jobs that other processes finished are found by their version."""
        job = self._jobs.get(ref.run_id)
        if job is None:
            return _stored_status(ref, self._versions.of_job(ref.run_id))
        if not job.task.done():
            return job_status(
                ref, TrainingStatusEnum.RUNNING, job.progress, metadata={"metrics": dict(job.metrics)}
            )
        if job.task.cancelled():
            return job_status(ref, TrainingStatusEnum.CANCELED)
        error = job.task.exception()
        if error is None:
            return _stored_status(ref, job.task.result(), self._require_learner().note)
        canceled = isinstance(error, TrainingCanceled)
        status = TrainingStatusEnum.CANCELED if canceled else TrainingStatusEnum.FAILED
        return job_status(ref, status, message=str(error))

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait for the thread itself; `poll_interval` plays no part."""
        job = self._jobs.get(ref.run_id)
        if job is not None:
            await asyncio.wait([job.task])
        return await self.status(ref)

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append the facts to `local_jobs.jsonl` in `output_dir`; without one they are in the status."""
        if output_dir is not None:
            JobLog.of("local", output_dir).add(ref.run_id, metrics)

    async def current_version(self) -> ModelVersion:
        """The weights in memory."""
        return await asyncio.to_thread(self._current_version)

    async def restore(self, version: ModelVersion) -> None:
        """Go back to `version`, weights and optimiser, so that the next job starts from it."""
        await asyncio.to_thread(self._restore, version)

    async def count_from(self, number: int) -> None:
        """See `TrainerAdapter.count_from`."""
        self._newest = max(self._newest, number)

    async def prune(self, keep: Collection[ModelVersion]) -> None:
        """Delete the folders of other versions; that of the weights in memory stays, to be gone back to."""
        self._versions.prune({version.number for version in keep} | {self._policy.version})

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Stop the job before it goes on to more data."""
        job = self._jobs.get(ref.run_id)
        if job is not None:
            job.canceled.set()
            await asyncio.wait([job.task])

    async def cleanup(self) -> None:
        """Stop jobs that still run."""
        for name in list(self._jobs):
            await self.cancel(TrainingJobRef(run_id=name, backend="local"))

    def _current_version(self) -> ModelVersion:
        with self._policy.lock:
            number = self._policy.version
            location = str(self._versions.folder(number)) if number else self._policy.source
            return ModelVersion(number=number, location=location, digest=self._policy.digest())

    def _restore(self, version: ModelVersion) -> None:
        with self._policy.lock:
            self._newest = max(self._newest, self._policy.version, version.number)
            self._policy.adopt(self._versions.here(version))
            if self._optimiser_of != version.number:
                self._take_optimiser_of(version.number)

    def _train(self, order: _Order, canceled: threading.Event) -> FinishedJob:
        """In a thread: train, and save the new version. Everything is as it was after any error."""
        learner, policy, config = self._require_learner(), self._policy, order.config
        name, algorithm = order.name, order.algorithm
        with policy.lock:
            start = policy.version
            if self._optimiser_of != start:
                self._take_optimiser_of(start)
            number, before = max(self._newest, start, self._versions.newest()) + 1, policy.copy_tensors()
            learner.options = replace(
                learner.options, learning_rate=config.learning_rate, passes=config.passes
            )
            try:
                units, facts = algorithm.units(order.groups, learner.divergences)
                metrics = learner.train(units, algorithm, self._on_step(name), canceled) | facts
                content = replace(order.content, start=str(start))
                finished = self._versions.write(name, number, content, metrics, policy, learner)
            except BaseException as error:
                policy.load_tensors(before)
                self._take_optimiser_of(start)
                if isinstance(error, RuntimeError):
                    raise TrainingError(
                        f"training failed: {error}; if memory ran out, lower token_budget of the adapter"
                    ) from error
                raise
            policy.mark_changed(number, finished.version.digest)
            self._newest = self._optimiser_of = number
        return finished

    def _take_optimiser_of(self, number: int) -> None:
        """Put the optimiser to where it was when a version was made."""
        if number:
            self._require_learner().restore(self._versions.folder(number))
        else:
            self._require_learner().reset()
        self._optimiser_of = number

    def _on_step(self, name: str) -> Callable[[StepReport], None]:
        def report(step: StepReport) -> None:
            job = self._jobs.get(name)
            if job is not None:
                job.metrics = dict(step.metrics)
                job.progress = min(100.0, job.progress + 100.0 / step.of)

        return report

    def _require_learner(self) -> Learner:
        if self._learner is None:
            raise TrainingError("the local adapter was not initialized; call initialize(run_config) first")
        return self._learner


def _lora_words(lora: LoraConfig | None) -> str:
    return "all weights" if lora is None else f"LoRA weights of rank {lora.r} and alpha {lora.alpha:g}"


def _stored_status(
    ref: TrainingJobRef, finished: FinishedJob | None, note: str | None = None
) -> TrainingJobStatus:
    if finished is None:
        return job_status(ref, TrainingStatusEnum.NOT_FOUND, message="no such job in this process or folder")
    return job_status(ref, TrainingStatusEnum.COMPLETED, 100.0, message=note, metadata=finished.metadata())
