"""The local backend: jobs run in this process or on a cluster, and versions are folders of the run."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from etude.algorithms.algorithm import find_algorithm, gradient_fields, make_algorithm, read_groups
from etude.backends.cluster_training import ClusterLearners, Learners
from etude.backends.job_training import FinishedJob, Job, LocalLearner, learner_options
from etude.backends.state_folders import JobContent, StateFolders
from etude.backends.trainer_adapter import (
    LOCAL_CAPABILITIES,
    Capabilities,
    JobHyperparameters,
    LocalAdapterConfig,
    TrainerAdapter,
    job_status,
)
from etude.config.finetuning import FinetuneConfig, LoraOptions
from etude.core.errors import CapabilityError, TrainingError
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.keys import content_hash, fold
from etude.core.sample import TrajectoryCollection
from etude.learner.learner import TrainingCanceled
from etude.models.device import release_threads
from etude.models.policy import Policy
from etude.store.files import DamagedError

_LOG = logging.getLogger("etude.versions")
_NOT_INITIALIZED = "was not initialized; call initialize(run_config) first"

_NO_MATTER = {
    "reward",
    "token_budget",
    "gradient_checkpointing",
    "shard_training",
    "checkpoint_steps",
    "checkpoint_seconds",
}
"""Config keys that change how a job computes, but not what it learns."""


class LocalAdapter(TrainerAdapter):
    """The trainer of the policy that the engine samples from. Its versions are in the run folder.

    With `collect_ahead` it trains a twin of the policy, whose trained tensors are in memory twice. A
    version's folder appears by one rename, with the weights, the optimiser state and the job that made it. A
    killed job is trained again from the previous version. On a cluster it resumes from its last checkpoint.
    """

    adapter_config: LocalAdapterConfig

    def __init__(
        self,
        adapter_config: LocalAdapterConfig,
        policy: Policy,
        folder: Path,
        seed: int,
        learners: Learners | None = None,
        *,
        writes_each: bool = True,
    ) -> None:
        """`learners` train on the nodes of a cluster. Without them, this process trains.

        `writes_each`: write each version to disk before its job ends, because others read it there or nobody
        would make a lost one again.
        """
        super().__init__(adapter_config)
        self._policy = policy
        self._learners = learners
        self._versions = StateFolders(folder, "v", "version")
        self._seed = seed
        self._whole: set[int] = set()
        """Versions that have been verified."""
        self._jobs: dict[str, Job] = {}
        self._turn = asyncio.Lock()
        """Held by the training job."""
        self._workplace: LocalLearner | ClusterLearners | None = None
        self._hyperparameters = JobHyperparameters()
        self._writes_each = writes_each
        self._is_warm = False
        """Whether a warm-up has ended."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Add LoRA weights to the model if the config asks for them, and create the optimiser."""
        await super().initialize(run_config)
        config = self.adapter_config
        lora = config.lora_with(self._hyperparameters)
        if lora is not None:
            self._policy.use_lora(lora, fold(self._seed, "lora"))
        self._policy.keep_base()
        if run_config.collect_ahead:
            # The engine samples from the old weights until it adopts the new ones.
            sampled = self._policy
            self._policy = sampled.trained = await asyncio.to_thread(sampled.twin)
        job_parts = self._policy, self._versions, run_config
        if self._learners is None:
            options, seconds = learner_options(config, run_config), config.checkpoint_seconds
            self._workplace = LocalLearner(*job_parts, options, seconds)
        else:
            self._workplace = ClusterLearners(self._learners, *job_parts)
        release_threads()

    def capabilities(self) -> Capabilities:
        return LOCAL_CAPABILITIES

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """Set hyperparameters of the next jobs. LoRA settings can only change before `initialize`."""
        before = self.adapter_config.lora_with(self._hyperparameters)
        after = self.adapter_config.lora_with(hyperparameters)
        if self._workplace is not None and before != after:
            raise CapabilityError(
                f"the model trains {_lora_words(before)} since the adapter was initialized, and cannot train "
                f"{_lora_words(after)}: make the group (lora_rank, lora_alpha_scale) before "
                "`adapter.initialize`, or set 'lora' in the adapter's config"
            )
        self._hyperparameters = hyperparameters

    async def is_healthy(self) -> bool:
        is_ready = self._workplace is not None
        self.unhealthy_because = None if is_ready else _NOT_INITIALIZED
        return is_ready

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start training in the background, unless a job of the same name and content exists."""
        name = trajectories.run_id
        ref = TrainingJobRef(run_id=name, backend="local")
        self._require_workplace()
        algorithm = find_algorithm(trajectories.method, self.algorithm)
        beta = self._hyperparameters.dpo_beta
        if algorithm.kind == "pairs" and beta is not None:
            options = algorithm.model_dump(mode="json", exclude_unset=True)
            algorithm = make_algorithm(algorithm.type_name, options | {"beta": beta})
        config = self.adapter_config.for_job(algorithm.kind, self._hyperparameters)
        schedule = learner_options(self.adapter_config, self.run_config).schedule
        decides = {
            "config": config.model_dump(mode="json", exclude=_NO_MATTER),
            "options": algorithm.model_dump(mode="json", include={*gradient_fields(type(algorithm))}),
            "epochs": None if config.lr_schedule == "constant" else schedule.trainings,
            "seed": self._seed,
        }
        content = JobContent(trajectories.data_hash(), trajectories.method, content_hash(decides))
        finished = await asyncio.to_thread(self._find_finished_job, name)
        running = self._jobs.get(name)
        if running is not None:
            running.content.require(name, content)
        if finished is not None:
            number = str(finished.version.number)
            finished.content.require(name, replace(content, start=str(self._policy.version)), number)
        if running is not None or finished is not None:
            return ref
        # Built before the job starts, so that unusable data raise an error here.
        groups = read_groups(trajectories.groups, algorithm, self._policy.template.encoder)
        skipped = await asyncio.to_thread(algorithm.reason_to_skip, groups)
        if skipped is not None:
            return skipped
        job = Job(name, algorithm, config, trajectories, groups, content, self._seed)
        job.at_once = self._writes_each or (bool(self.run_config.warm_up) and not self._is_warm)
        self._jobs[name] = job
        job.task = asyncio.create_task(self._train(job))
        # asyncio would warn of an error that nobody asks for, as after a cancellation.
        job.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the job's status. A version's folder tells which jobs other processes finished."""
        job = self._jobs.get(ref.run_id)
        if job is None or job.task is None:
            if (finished := await asyncio.to_thread(self._find_finished_job, ref.run_id)) is not None:
                return _job_status(ref, finished)
            reason = "no such job in this process or folder"
            return job_status(ref, TrainingStatusEnum.NOT_FOUND, message=reason)
        if not job.task.done():
            metadata, status = {"metrics": dict(job.metrics)}, TrainingStatusEnum.RUNNING
            return job_status(ref, status, progress=job.progress, message=job.news, metadata=metadata)
        if job.task.cancelled():
            return job_status(ref, TrainingStatusEnum.CANCELED)
        error = job.task.exception()
        if error is None:
            return _job_status(ref, job.task.result(), self._require_workplace().note)
        canceled = isinstance(error, TrainingCanceled)
        status = TrainingStatusEnum.CANCELED if canceled else TrainingStatusEnum.FAILED
        return job_status(ref, status, message=str(error))

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait for the job itself. `poll_interval` is not used."""
        job = self._jobs.get(ref.run_id)
        if job is not None and job.task is not None:
            await asyncio.wait([job.task])
        return await self.status(ref)

    async def current_version(self) -> ModelVersion:
        return await asyncio.to_thread(self._current_version)

    async def restore(self, version: ModelVersion) -> None:
        """Restore the weights and optimiser of `version`, so that the next job starts from it."""
        async with self._turn:
            await asyncio.to_thread(self._restore, version)

    async def begin_from(self, version: ModelVersion) -> None:
        """Restart optimiser and schedule at `version`, which also becomes the reference model."""
        self._is_warm = True
        await asyncio.to_thread(self._begin_from, self._with_current_path(version))

    async def damage(self, version: ModelVersion) -> list[str]:
        """Return how a version's folder differs from the written one. The base model has no folder."""
        return await asyncio.to_thread(self._versions.damage, version.number) if version.number else []

    async def go_back(self, version: ModelVersion) -> list[str]:
        """Set aside the folders of later versions."""
        later = [number for number in self._versions.numbers() if number > version.number]
        paths = [self._versions.set_aside(number) for number in later]
        return [path.name for path in paths if path is not None]

    async def keep(self, version: ModelVersion) -> None:
        """Write the version if it is the one in memory and is not on disk yet."""
        if version.number == self._policy.version:
            await asyncio.to_thread(self._require_workplace().keep)

    async def prune(self, keep: Collection[ModelVersion]) -> None:
        """Delete the folders of other versions, except the last written one, which a run can go back to."""
        written = [number for number in self._versions.numbers() if number <= self._policy.version]
        self._versions.prune({version.number for version in keep} | {*written[-1:]})

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Stop the job before its next batch of data."""
        job = self._jobs.get(ref.run_id)
        if job is not None and job.task is not None:
            job.canceled.set()
            await asyncio.wait([job.task])

    async def cleanup(self) -> None:
        for name in list(self._jobs):
            await self.cancel(TrainingJobRef(run_id=name, backend="local"))
        if self._workplace is not None:
            await asyncio.to_thread(self._workplace.close)

    def _current_version(self) -> ModelVersion:
        with self._policy.lock:
            number = self._policy.version
            location = str(self._versions.folder(number)) if number else self._policy.source
            return ModelVersion(number=number, location=location, digest=self._policy.digest())

    def _begin_from(self, version: ModelVersion) -> None:
        with self._policy.lock:
            self._policy.begin_from(version)
            self._require_workplace().begin_from(version)

    def _restore(self, version: ModelVersion) -> None:
        with self._policy.lock:
            if version.number != self._policy.version:
                self._require_workplace().keep()  # The weights in memory are about to be replaced.
            self._highest_number = max(self._highest_number, self._policy.version, version.number)
            self._policy.adopt(self._with_current_path(version))
            self._require_workplace().go_to(version.number)

    async def _train(self, job: Job) -> FinishedJob:
        """Train, and make the new version. After an error, the state is as for `LocalLearner.train`."""
        async with self._turn:
            start = await self.current_version()
            job.content = replace(job.content, start=str(start.number))
            job.number = max(self._highest_number, start.number, self._versions.newest()) + 1
            finished = await self._require_workplace().train(job, start)
            self._highest_number = job.number
            self._whole.add(job.number)
            return finished

    def _find_finished_job(self, name: str) -> FinishedJob | None:
        """Return the finished job of a name, if its version's folder exists and is undamaged."""
        for number in self._versions.numbers():
            try:
                finished = FinishedJob.model_validate(self._versions.facts(number))
            except DamagedError as error:
                self._give_up(number, [error.clause])
                continue
            if finished.job != name:
                continue
            if number not in self._whole and (damage := self._versions.damage(number)):
                self._give_up(number, damage)
                continue
            self._whole.add(number)
            return finished.model_copy(update={"version": self._with_current_path(finished.version)})
        return None

    def _give_up(self, number: int, damage: Sequence[str]) -> None:
        """Set a damaged version aside, so that its job is run again, unless later versions exist."""
        if number <= self._policy.version:
            return
        aside = self._versions.set_aside(number)
        if aside is not None:
            _LOG.warning(
                "version %d is damaged (%s): it is set aside as %s, and its job is made again",
                number,
                "; ".join(damage),
                aside.name,
            )

    def _with_current_path(self, version: ModelVersion) -> ModelVersion:
        """Return the version with its folder's current path, because a run may have been moved."""
        if not version.number:
            return version
        return version.model_copy(update={"location": str(self._versions.folder(version.number))})

    def _require_workplace(self) -> LocalLearner | ClusterLearners:
        if self._workplace is None:
            raise TrainingError(f"the local adapter {_NOT_INITIALIZED}")
        return self._workplace


def _lora_words(lora: LoraOptions | None) -> str:
    return "all weights" if lora is None else f"LoRA weights of rank {lora.r} and alpha {lora.alpha:g}"


def _job_status(ref: TrainingJobRef, finished: FinishedJob, note: str | None = None) -> TrainingJobStatus:
    made = {"version": finished.version, "metadata": {"metrics": finished.metrics}}
    return job_status(ref, TrainingStatusEnum.COMPLETED, progress=100.0, message=note, **made)
