"""The OpenPipe ART backend: jobs are streams of an ART server, versions are the steps of its model."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from etude.backends.capabilities import Capabilities, check_method
from etude.backends.trainer_adapter import JobLog, TrainerAdapter, job_status
from etude.config.finetuning import FinetuneConfig
from etude.core.edge import TrajectoryCollection
from etude.core.errors import CapabilityError, EtudeError, TrainingError
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.keys import content_hash
from etude.core.trajectory import Trajectory
from etude.integrations.art.client import ArtClient, ArtError, ArtInference, ArtJob, ArtJobs, ArtProgress
from etude.integrations.art.config import ARTTrainerAdapterConfig
from etude.integrations.art.wire import ArtGroup, ArtModel, check_episode_order, group_of, groups_of
from etude.jobs.folders import JobContent, data_hash

T = TypeVar("T")

BACKEND = "openpipe_art"
_POLL = 0.5
"""Seconds between two questions after something that is about to be there."""

CAPABILITIES = Capabilities(
    methods=frozenset({"grpo"}),
    options=frozenset(),
    versions=True,
    samples_while_training=False,
    transcripts=False,
    old_versions=False,
)


class ARTTrainerAdapter(TrainerAdapter):
    """Trains on an ART server, and has the agents sample from the step that each job makes.

    The protocol has no job ids, no table of jobs and no word for success. What a job did is known by the
    model's step: the file `art_jobs.json` in `folder` has the step before each job, so that a later
    process finds out whether the job of an earlier one was done.
    """

    adapter_config: ARTTrainerAdapterConfig

    def __init__(
        self,
        adapter_config: ARTTrainerAdapterConfig,
        *,
        engine: Engine | None = None,
        inference: ArtInference | None = None,
        folder: Path | None = None,
        log: Path | None = None,
    ) -> None:
        """`engine` is what the agents sample from, at `inference`; `log` gets the jobs' steps.

        A run gives them all. Without the first two nothing looks whether the model is served and sampled
        from, without the folder no later process knows of the jobs.
        """
        super().__init__(adapter_config)
        self.remote_backend = ArtClient(adapter_config)
        """The training server."""
        self.model = ArtModel.of(adapter_config)
        """The model that is trained, as the server is told of it."""
        self._model_internal_config = self.model.internal_config
        self._training_jobs: dict[str, asyncio.Task[None]] = {}
        self._progress: dict[str, ArtProgress] = {}
        self._engine = engine
        self._inference = inference
        self._jobs_file = None if folder is None else folder / "art_jobs.json"
        self.job_log = JobLog(log)
        self._jobs: ArtJobs | None = None
        self._version: ModelVersion | None = None

    @property
    def training_jobs(self) -> dict[str, asyncio.Task[None]]:
        """The jobs of this process by their names; a task is done when its job is over."""
        return self._training_jobs

    def capabilities(self) -> Capabilities:
        """GRPO on LoRA weights. Every job starts from the last one's weights."""
        return CAPABILITIES

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Register the model, have it served, look after earlier jobs, and sample from where the run began.

        Raises ArtError when the training server or the inference endpoint does not do its part.
        """
        await super().initialize(run_config)
        jobs = self._jobs = ArtJobs.read(self._jobs_file)
        await self.remote_backend.check_health()
        await self.remote_backend.register()
        address = await self.remote_backend.prepare()
        if self.adapter_config.backend.delete_old_checkpoints:
            step = await self.remote_backend.step()
            if not await self.remote_backend.keep_checkpoints(list(range(step + 1))):
                raise CapabilityError(
                    f"the ART server {self.remote_backend.url} cannot delete checkpoints by their step (0.4 "
                    "cannot); set 'backend.delete_old_checkpoints: false'"
                )
        for name, job in list(jobs.jobs.items()):
            if not job.status.is_final:
                await self._recover(name, job)
        try:
            base = jobs.base or await self._served(await self.remote_backend.step(), "the beginning")
            if self._inference is not None:
                await self._inference.probe(await self._name_of(base.number))
        except ArtError as error:
            raise ArtError(f"{error}. The ART server says that it serves the model at {address}") from error
        jobs.keep(base=base)
        await self.restore(base)
        if self._engine is not None:
            await self._engine.adopt(base)

    async def is_healthy(self) -> bool:
        """Whether the training server is well, and the endpoint serves the model."""
        try:
            await self.remote_backend.check_health()
            await self._name_of(await self.remote_backend.step())
        except ArtError:
            return False
        return True

    async def _validate_episode_order(self, traj: Trajectory) -> None:
        """Raise ValueError for an episode that ART cannot train on, as `check_episode_order` has it."""
        check_episode_order(traj)

    async def _construct_trajectory_groups(self, trajectory_lists: list[list[Trajectory]]) -> list[ArtGroup]:
        """ART's groups, one for each example. Raises ValueError for a trajectory that is not valid."""
        return [group_of(trajectories) for trajectories in trajectory_lists]

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Start training, unless that job was done already. Raises as `groups_of`."""
        check_method(f"'{BACKEND}'", self.capabilities(), trajectories.method)
        jobs, name = self._require_jobs(), trajectories.run_id
        ref = TrainingJobRef(run_id=name, backend=BACKEND)
        trains = name in self._training_jobs and not self._training_jobs[name].done()
        known, how = jobs.jobs.get(name), self.adapter_config.training.model_dump(mode="json")
        content = JobContent.of(data_hash(trajectories), trajectories.method, how)
        if not trains and known is not None and known.status is TrainingStatusEnum.RUNNING:
            await self._recover(name, known, wait=0)
            known = jobs.jobs.get(name)
        if known is not None and (trains or known.status is TrainingStatusEnum.COMPLETED):
            known.content.require(name, content)
            return ref
        progress = ArtProgress(groups_of(trajectories))
        step, message = await self.remote_backend.step(), None
        if self._version is not None and (sampled := self._version.number) != step:
            message = (
                f"sampled at step {sampled}, trained from step {step}: an earlier job was done after all"
            )
        job = ArtJob(content=content, before=step, message=message)
        jobs.put(name, job)
        self._progress[name] = progress
        self._training_jobs[name] = asyncio.create_task(
            self._follow(name, job, progress), name=f"train {name}"
        )
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where the job stands. One whose process and work are gone is NOT_FOUND."""
        task = self._training_jobs.get(ref.run_id)
        if task is not None and not task.done():
            progress = self._progress[ref.run_id]
            metrics = {"metrics": progress.metrics, "rejected": progress.given.rejected}
            return job_status(ref, TrainingStatusEnum.RUNNING, progress=progress.percent, metadata=metrics)
        job = self._require_jobs().jobs.get(ref.run_id)
        if job is None or not job.status.is_final:
            return job_status(
                ref, TrainingStatusEnum.NOT_FOUND, message="no job of that name was submitted and finished"
            )
        if job.version is None:
            return job_status(ref, job.status, message=job.message)
        made = {"version": job.version, "metadata": {"metrics": job.metrics}}
        return job_status(ref, job.status, progress=100.0, message=job.message, **made)

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait for the stream's end, `job_timeout` seconds at most; `poll_interval` plays no part."""
        task = self._training_jobs.get(ref.run_id)
        if task is not None:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return await self.status(ref)

    async def current_version(self) -> ModelVersion | None:
        """The step that was made, or gone back to, last; None before `initialize`."""
        return self._version

    async def restore(self, version: ModelVersion) -> None:
        """Make sure that the server goes on from `version`, or from a job of this run after it.

        Raises TrainingError when it does not: ART has no way back.
        """
        step, jobs = await self.remote_backend.step(), self._require_jobs().jobs.values()
        may_be_reached = {job.before + more for job in jobs for more in (0, 1)}
        if step == version.number or (step > version.number and step in may_be_reached):
            self._version = version
            return
        backend = self.adapter_config.backend
        raise TrainingError(
            f"the model '{backend.name}' (project '{backend.project}') is at step {step} on {backend.url}, "
            f"and this run left it at step {version.number}: something else trained it, or its checkpoints "
            "were deleted. Start a new run, with another 'backend.name'"
        )

    async def prune(self, keep: Collection[ModelVersion]) -> None:
        """Have the server delete other checkpoints, where the config asks for it."""
        if self.adapter_config.backend.delete_old_checkpoints:
            await self.remote_backend.keep_checkpoints(
                sorted({version.number for version in keep} | {await self.remote_backend.step()})
            )

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Close the job's stream, at which the server stops."""
        task = self._training_jobs.get(ref.run_id)
        if task is None or task.done():
            return
        task.cancel()
        await asyncio.wait([task])
        self._end(ref.run_id, TrainingStatusEnum.CANCELED, "cancelled")

    async def cleanup(self) -> None:
        """Close the streams and connections. What the server finishes all the same is found on a resume."""
        tasks = list(self._training_jobs.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.remote_backend.close()
        if self._inference is not None:
            await self._inference.close()

    async def _follow(self, name: str, job: ArtJob, progress: ArtProgress) -> None:
        """Read the job's stream to its end, and write down what became of it."""
        seconds = self.adapter_config.job_timeout
        error: ArtError | None = None
        try:
            async with asyncio.timeout(seconds):
                async for line in self.remote_backend.train(progress.given.groups):
                    progress.take(line)
                    self.job_log.add(
                        name, {key: value for key, value in line.items() if math.isfinite(value)}
                    )
        except TimeoutError:
            self._end(name, TrainingStatusEnum.FAILED, f"not done after {seconds:g} s ('job_timeout')")
            return
        except ArtError as failure:
            error = failure
        refused = error is not None and error.status is not None
        wait = self.adapter_config.recover_wait if error is not None and not refused else 0
        try:
            step = await self._step_after(job.before, wait)
            problem = _problem(job, step, progress, error)
            if problem is None:
                message = job.message if error is None else str(error)
                await self._complete(name, step, progress.metrics, message)
            else:
                self._end(name, TrainingStatusEnum.FAILED, problem)
        except ArtError as failure:
            self._end(name, TrainingStatusEnum.FAILED, str(error or failure))

    async def _recover(self, name: str, job: ArtJob, wait: float | None = None) -> None:
        """Find out whether the job of an earlier process was done; else it stays as it is."""
        seconds = self.adapter_config.recover_wait if wait is None else wait
        step = await self._step_after(job.before, seconds)
        if step == job.before + 1:
            message = "the connection was lost; the model's step says that the job was done"
            await self._complete(name, step, {}, message)

    async def _step_after(self, before: int, seconds: float) -> int:
        """The model's step, once it is higher than `before`, or after so many seconds."""
        patience = self.adapter_config.recover_wait
        return await _within(seconds, patience, self.remote_backend.step, lambda step: step > before)

    async def _complete(self, name: str, step: int, metrics: dict[str, float], message: str | None) -> None:
        version = await self._served(step, name)
        self._version = version
        self._end(name, TrainingStatusEnum.COMPLETED, message, metrics=metrics, version=version)

    def _end(self, name: str, status: TrainingStatusEnum, message: str | None, **facts: Any) -> None:
        jobs = self._require_jobs()
        if (job := jobs.jobs.get(name)) is not None:
            jobs.put(name, job.model_copy(update={"status": status, "message": message, **facts}))
        self.job_log.add(name, {"status": status, "message": message})

    async def _served(self, step: int, job: str) -> ModelVersion:
        """The version of a step, by the name under which it is served. Raises ArtError when it is not."""
        location = await self._name_of(step)
        backend = self.adapter_config.backend
        # ART tells no hash of the weights; where they came from is what can be known.
        digest = content_hash([backend.url, backend.project, backend.name, step, job])
        return ModelVersion(number=step, location=location, digest=digest)

    async def _name_of(self, step: int) -> str:
        """`name@step` (0.5), or the bare name (0.4, which swaps the weights beneath it)."""
        name = self.adapter_config.backend.name
        names = (f"{name}@{step}", name)
        if self._inference is None:
            return names[0]
        patience = self.adapter_config.recover_wait
        served = await _within(
            patience, patience, self._inference.models, lambda served: bool({*served} & {*names})
        )
        for candidate in names:
            if candidate in served:
                return candidate
        raise ArtError(
            f"the inference endpoint {self._inference.url} serves neither '{names[0]}' nor '{name}'; "
            f"it serves: {', '.join(served[:8]) or 'nothing'}"
        )

    def _require_jobs(self) -> ArtJobs:
        if self._jobs is None:
            raise EtudeError("the ART adapter was not initialized; call initialize(run_config) first")
        return self._jobs


async def _within(
    seconds: float, patience: float, ask: Callable[[], Awaitable[T]], is_there: Callable[[T], bool]
) -> T:
    """The answer, asked for again until it is what is waited for, or `seconds` are over.

    For `patience` seconds, no answer or a server's error is not the end of it. Raises ArtError.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        try:
            answer = await ask()
            if is_there(answer) or loop.time() >= began + seconds:
                return answer
        except ArtError as error:
            refused = error.status is not None and error.status < 500
            if refused or loop.time() >= began + patience:
                raise
        await asyncio.sleep(_POLL)


def _problem(job: ArtJob, step: int, progress: ArtProgress, error: ArtError | None) -> str | None:
    """Why a job whose stream is over has failed; None when it is done."""
    if step == job.before:
        if error is not None:
            return str(error)
        of = f" of {progress.total}" if progress.total else ""
        return (
            f"the server ended the job after {progress.steps}{of} gradient steps, and the model is still at "
            f"step {step}"
        )
    if step != job.before + 1:
        return f"the model went from step {job.before} to {step}: something else trains it as well"
    if error is None and not progress.steps:
        return (
            f"the server went on to step {step} without training: it found nothing in the batch to train on "
            "(no group with differing rewards, sequences that are too long, or a server that takes choices "
            "for plain messages, as that of ART 0.5.17 does)"
        )
    return None
