"""The local backend: jobs run in a thread, versions are folders of the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.algorithms.algorithm import Algorithm, algorithm_of
from etude.backends.capabilities import Capabilities, JobHyperparameters
from etude.backends.local_config import LOCAL_CAPABILITIES, LocalAdapterConfig, LoraConfig
from etude.backends.trainer_adapter import TrainerAdapter, job_status
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import CapabilityError, RequestError, TrainingError
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.keys import fold
from etude.core.sample import SampleOrPair
from etude.core.trajectory import TrajectoryCollection
from etude.jobs.content import JobContent, data_hash
from etude.jobs.folders import StateFolders
from etude.jobs.training import JobData, JobListener, JobTraining, units_of_collection
from etude.learner.learner import Learner, LearnerOptions, TrainingCanceled, is_trained
from etude.learner.plan import Schedule, Step
from etude.models.policy import LoraOptions, Policy

_NO_MATTER = {"reward", "token_budget", "packing", "gradient_checkpointing"}
"""Keys of the config that change how a job computes, and not what it learns."""


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job and the version that it made."""

    version: ModelVersion
    metrics: dict[str, float]
    content: JobContent
    """Its start is the number of a version."""


@dataclass(slots=True)
class _Job(JobListener):
    """A job of this process, which listens to its training."""

    name: str
    algorithm: Algorithm
    config: LocalAdapterConfig
    groups: list[list[SampleOrPair]]
    content: JobContent
    """Without its start, which is known once it trains."""
    canceled: threading.Event = field(default_factory=threading.Event)
    progress: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    task: asyncio.Task[FinishedJob] | None = None

    def stepped(self, step: Step, metrics: Mapping[str, float]) -> None:
        self.metrics, self.progress = dict(metrics), 100.0 * step.number / step.of


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
        self._versions = StateFolders(folder, "v", "version")
        self._seed = seed
        self._newest = 0
        """The highest version that is known: a job makes one after it, wherever it starts."""
        self._optimiser_of = 0
        """The version that the optimiser's state belongs to; engines adopt versions on their own."""
        self._begins_from = 0
        """The version whose optimiser has taken no step: the base, or what a warm-up made."""
        self._jobs: dict[str, _Job] = {}
        self._learner: Learner | None = None
        self._hyperparameters = JobHyperparameters()

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Put LoRA weights on the model where the config asks for them, and make the optimiser."""
        await super().initialize(run_config)
        lora = self.adapter_config.lora_with(self._hyperparameters)
        if lora is None and self._policy.is_quantized:
            raise CapabilityError(
                "a model with `quantization: 4bit` trains LoRA weights only: set 'lora' in its adapter, as "
                "`lora: {r: 16}`, or leave 'quantization' out"
            )
        if lora is not None:
            try:
                self._policy.use_lora(LoraOptions(**lora.model_dump()), fold(self._seed, "lora"))
            except ValueError as error:
                raise RequestError(f"LoRA weights do not fit this model: {error}") from error
        self._versions.delete_drafts()
        self._policy.keep_base()
        if run_config.collect_ahead:
            # The engine samples from the weights as they were, until it adopts those that are made here.
            self._policy = await asyncio.to_thread(self._policy.twin)
        options = learner_options(self.adapter_config, run_config)
        self._learner = Learner(self._policy, options)

    def capabilities(self) -> Capabilities:
        return LOCAL_CAPABILITIES

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """Give these to the jobs from now on; those of LoRA weights only before `initialize` makes them."""
        before = self.adapter_config.lora_with(self._hyperparameters)
        after = self.adapter_config.lora_with(hyperparameters)
        if self._learner is not None and before != after:
            raise CapabilityError(
                f"the model trains {_lora_words(before)} since the adapter was initialized, and cannot train "
                f"{_lora_words(after)}: make the group (lora_rank, lora_alpha_scale) before "
                "`adapter.initialize`, or set 'lora' in the adapter's config"
            )
        self._hyperparameters = hyperparameters

    async def is_healthy(self) -> bool:
        return self._learner is not None

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Start training in a thread, unless there is a job of that name and content."""
        name = trajectories.run_id
        ref = TrainingJobRef(run_id=name, backend="local")
        learner, algorithm = self._require_learner(), algorithm_for(trajectories, self._hyperparameters)
        config = self.adapter_config.for_job(algorithm.kind, self._hyperparameters)
        facts = hyperparameters_of(algorithm, config, learner.options.schedule, self._seed)
        content = JobContent.of(data_hash(trajectories), trajectories.method, facts)
        running, finished = self._jobs.get(name), self._finished(name)
        if running is not None:
            running.content.require(name, content)
        if finished is not None:
            number = str(finished.version.number)
            finished.content.require(name, replace(content, start=str(self._policy.version)), number)
        if running is not None or finished is not None:
            return ref
        # Made before the job starts, so that data which cannot be trained on is an error here.
        groups = units_of_collection(trajectories, algorithm, self._policy.template)
        self._jobs[name] = job = _Job(name, algorithm, config, groups, content)
        job.task = asyncio.create_task(asyncio.to_thread(self._train, job))
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where the job stands; jobs that other processes finished are found by their version."""
        job = self._jobs.get(ref.run_id)
        if job is None or job.task is None:
            if (finished := self._finished(ref.run_id)) is not None:
                return _completed(ref, finished)
            reason = "no such job in this process or folder"
            return job_status(ref, TrainingStatusEnum.NOT_FOUND, message=reason)
        if not job.task.done():
            metadata = {"metrics": dict(job.metrics)}
            return job_status(ref, TrainingStatusEnum.RUNNING, progress=job.progress, metadata=metadata)
        if job.task.cancelled():
            return job_status(ref, TrainingStatusEnum.CANCELED)
        error = job.task.exception()
        if error is None:
            return _completed(ref, job.task.result(), self._require_learner().note)
        canceled = isinstance(error, TrainingCanceled)
        status = TrainingStatusEnum.CANCELED if canceled else TrainingStatusEnum.FAILED
        return job_status(ref, status, message=str(error))

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait for the thread itself; `poll_interval` plays no part."""
        job = self._jobs.get(ref.run_id)
        if job is not None and job.task is not None:
            await asyncio.wait([job.task])
        return await self.status(ref)

    async def current_version(self) -> ModelVersion:
        return await asyncio.to_thread(self._current_version)

    async def restore(self, version: ModelVersion) -> None:
        """Go back to `version`, weights and optimiser, so that the next job starts from it."""
        await asyncio.to_thread(self._restore, version)

    async def count_from(self, number: int) -> None:
        self._newest = max(self._newest, number)

    async def begin_from(self, version: ModelVersion) -> None:
        """Start the optimiser and the schedule anew at `version`, which is the reference model too."""
        await asyncio.to_thread(self._begin_from, self._here(version))

    async def prune(self, keep: Collection[ModelVersion]) -> None:
        """Delete the folders of other versions; that of the weights in memory stays, to be gone back to."""
        self._versions.prune({version.number for version in keep} | {self._policy.version})

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Stop the job before it goes on to more data."""
        job = self._jobs.get(ref.run_id)
        if job is not None and job.task is not None:
            job.canceled.set()
            await asyncio.wait([job.task])

    async def cleanup(self) -> None:
        for name in list(self._jobs):
            await self.cancel(TrainingJobRef(run_id=name, backend="local"))

    def _current_version(self) -> ModelVersion:
        with self._policy.lock:
            number = self._policy.version
            location = str(self._versions.folder(number)) if number else self._policy.source
            return ModelVersion(number=number, location=location, digest=self._policy.digest())

    def _begin_from(self, version: ModelVersion) -> None:
        with self._policy.lock:
            self._policy.begin_from(version)
            self._begins_from = version.number
            if self._optimiser_of == version.number:
                self._take_optimiser_of(version.number)

    def _restore(self, version: ModelVersion) -> None:
        with self._policy.lock:
            self._newest = max(self._newest, self._policy.version, version.number)
            self._policy.adopt(self._here(version))
            if self._optimiser_of != version.number:
                self._take_optimiser_of(version.number)

    def _train(self, job: _Job) -> FinishedJob:
        """In a thread: train, and save the new version. Everything is as it was after any error."""
        learner, policy = self._require_learner(), self._policy
        groups, job.groups = job.groups, []  # They are no longer needed once the job is over.
        with policy.lock:
            start = policy.version
            if self._optimiser_of != start:
                self._take_optimiser_of(start)
            number = max(self._newest, start, self._versions.newest()) + 1
            before = policy.copy_tensors()
            learner.options = learner_options(job.config, self.run_config)
            try:
                units, facts = job.algorithm.units(groups, learner.divergences)
                data = JobData(
                    job.algorithm,
                    rows=[(unit,) for unit in units if is_trained(unit)],
                    passes=job.config.passes,
                    batch_size=job.config.batch_size,
                    seed=self._seed,
                    key=("pass", learner.step),
                )
                metrics = JobTraining(learner, data, job).run(job.canceled) | facts
                content = replace(job.content, start=str(start))
                written = {"job": job.name, "metrics": metrics, "content": asdict(content)}
                version = self._versions.write(number, written, learner, learner.snapshot())
            except BaseException as error:
                policy.load_tensors(before)
                self._take_optimiser_of(start)
                if isinstance(error, RuntimeError):
                    # torch says itself what to do about an operation that a device does not have.
                    lacks = isinstance(error, NotImplementedError)
                    hint = "" if lacks else "; if memory ran out, lower token_budget of the adapter"
                    raise TrainingError(f"training failed: {error}{hint}") from error
                raise
            policy.mark_changed(number, version.digest)
            self._newest = self._optimiser_of = number
        return FinishedJob(version, metrics, content)

    def _finished(self, name: str) -> FinishedJob | None:
        """The job of that name and its version, when its folder is still there. Raises StoreError."""
        for number in self._versions.numbers():
            facts = self._versions.facts(number)
            try:
                if facts["job"] == name:
                    version = self._here(ModelVersion.model_validate(facts["version"]))
                    return FinishedJob(version, facts["metrics"], JobContent(**facts["content"]))
            except (KeyError, TypeError, ValueError) as error:
                raise self._versions.damaged(number, error) from error
        return None

    def _here(self, version: ModelVersion) -> ModelVersion:
        """The version by its folder as it is now: a run may have been moved since it was made."""
        if not version.number:
            return version
        return version.model_copy(update={"location": str(self._versions.folder(version.number))})

    def _take_optimiser_of(self, number: int) -> None:
        """Put the optimiser to where it was when a version was made."""
        if number > self._begins_from:
            self._require_learner().restore(self._versions.folder(number))
        else:
            self._require_learner().reset()
        self._optimiser_of = number

    def _require_learner(self) -> Learner:
        if self._learner is None:
            raise TrainingError("the local adapter was not initialized; call initialize(run_config) first")
        return self._learner


def _lora_words(lora: LoraConfig | None) -> str:
    return "all weights" if lora is None else f"LoRA weights of rank {lora.r} and alpha {lora.alpha:g}"


def _completed(ref: TrainingJobRef, finished: FinishedJob, note: str | None = None) -> TrainingJobStatus:
    metadata = {"model_version": finished.version.model_dump(mode="json"), "metrics": finished.metrics}
    return job_status(ref, TrainingStatusEnum.COMPLETED, progress=100.0, message=note, metadata=metadata)


def algorithm_for(collection: TrajectoryCollection, given: JobHyperparameters) -> Algorithm:
    """The algorithm that a collection names. Raises RequestError for an unknown one, and for its options."""
    algorithm = algorithm_of(collection.method, collection.options)
    if algorithm.kind == "pairs" and given.dpo_beta is not None:
        return algorithm_of(collection.method, {**collection.options, "beta": given.dpo_beta})
    return algorithm


def hyperparameters_of(
    algorithm: Algorithm, config: LocalAdapterConfig, schedule: Schedule, seed: int
) -> dict[str, Any]:
    """All that decides what a job learns from its data, as JSON."""
    return {
        "config": config.model_dump(mode="json", exclude=_NO_MATTER),
        "options": algorithm.gradient(),
        "epochs": None if config.lr_schedule == "constant" else schedule.trainings,
        "seed": seed,
    }


def learner_options(config: LocalAdapterConfig, run: FinetuneConfig) -> LearnerOptions:
    """How the config takes optimiser steps in a run, of whose epochs each is one training."""
    epochs = config.lr_schedule_epochs or (1 if run.fine_tune_from_scratch else run.num_epochs)
    return LearnerOptions(
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        schedule=Schedule(config.lr_schedule, config.warmup_steps, config.lr_floor, epochs),
        token_budget=config.token_budget,
        packing=config.packing,
        gradient_checkpointing=config.gradient_checkpointing,
    )
