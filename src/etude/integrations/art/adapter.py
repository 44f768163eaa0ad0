"""The OpenPipe ART backend: a job is a stream from an ART server, and a version is a step of its model."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from etude.backends.state_folders import JobContent
from etude.backends.trainer_adapter import Capabilities, TrainerAdapter, check_method, job_status
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import EtudeError, TrainingError
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.keys import content_hash
from etude.core.sample import TrajectoryCollection
from etude.core.threads import end_tasks
from etude.core.trajectory import Trajectory
from etude.integrations.art.client import (
    ArtClient,
    ArtError,
    ArtGroup,
    ArtInference,
    ArtJob,
    ArtJobs,
    ArtModel,
    ArtProgress,
    check_episode_order,
    to_art_groups,
    to_art_trajectory,
)
from etude.integrations.art.config import ARTTrainerAdapterConfig

T = TypeVar("T")

BACKEND = "openpipe_art"
_POLL = 0.5
"""Seconds between two polls of the server."""
RECOVER_SECONDS = 30.0
"""The time to wait for a job to complete after its connection was lost."""


class ARTTrainerAdapter(TrainerAdapter):
    """A trainer adapter for an ART server. The agents sample from the step that each job makes.

    ART's protocol has no job ids, no list of jobs and no success message. Only the model's step shows that
    a job is done. The file `art_jobs.json` in `folder` stores the step before each job, so that a later
    process can tell whether an earlier job completed.
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
        """Create the adapter. A run passes all arguments; `log` receives the metrics of each gradient step.

        `engine` samples for the agents, at the endpoint `inference`. Without both, the adapter does not check
        that the model is served and sampled from. Without `folder`, later processes do not know the jobs.
        """
        super().__init__(adapter_config)
        self.remote_backend = ArtClient(adapter_config)
        """The client of the training server."""
        self.model = ArtModel.from_config(adapter_config)
        """The trained model, in the form that the server receives."""
        self._model_internal_config = self.model.internal_config
        self._training_jobs: dict[str, asyncio.Task[None]] = {}
        self._progress: dict[str, ArtProgress] = {}
        self._engine = engine
        self._inference = inference
        self._jobs_file = None if folder is None else folder / "art_jobs.json"
        self.job_log = log
        self._jobs: ArtJobs | None = None
        self._version: ModelVersion | None = None

    @property
    def training_jobs(self) -> dict[str, asyncio.Task[None]]:
        """The jobs of this process, by name. A task ends when its job ends."""
        return self._training_jobs

    def capabilities(self) -> Capabilities:
        """Return the capabilities: GRPO on LoRA weights. Each job starts from the last job's weights."""
        return Capabilities(
            methods=frozenset({"grpo"}),
            options=frozenset(),
            versions=True,
            samples_while_training=False,
            old_versions=False,
        )

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Register and load the model, recover earlier jobs, and sample from the run's base version.

        Raises ArtError if a server fails.
        """
        await super().initialize(run_config)
        jobs = self._jobs = ArtJobs.read(self._jobs_file)
        await self.remote_backend.check_health()
        await self.remote_backend.register()
        address = await self.remote_backend.prepare()
        for name, job in list(jobs.jobs.items()):
            if not job.status.is_final:
                await self._recover(name, job, RECOVER_SECONDS)
        try:
            base = jobs.base or await self._served_version(await self.remote_backend.step(), "the beginning")
        except ArtError as error:
            raise ArtError(f"{error}. The ART server says that it serves the model at {address}") from error
        jobs.keep(base=base)
        await self.restore(base)
        if self._engine is not None:
            await self._engine.adopt(base)

    async def is_healthy(self) -> bool:
        """Return whether the training server is healthy and the endpoint serves the model."""
        try:
            await self.remote_backend.check_health()
            await self._served_name(await self.remote_backend.step())
        except ArtError:
            return False
        return True

    async def _validate_episode_order(self, traj: Trajectory) -> None:
        """Raise ValueError for an episode that ART cannot train on (see `check_episode_order`)."""
        check_episode_order(traj)

    async def _construct_trajectory_groups(self, trajectory_lists: list[list[Trajectory]]) -> list[ArtGroup]:
        """Return ART's groups, one for each example. Raises ValueError for an invalid trajectory."""
        return [ArtGroup(trajectories=list(map(to_art_trajectory, group))) for group in trajectory_lists]

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Start training, unless the job is already running or completed. Raises as `to_art_groups`."""
        check_method(f"'{BACKEND}'", self.capabilities(), trajectories.method)
        jobs, name = self._require_jobs(), trajectories.run_id
        ref = TrainingJobRef(run_id=name, backend=BACKEND)
        trains = name in self._training_jobs and not self._training_jobs[name].done()
        known, how = jobs.jobs.get(name), self.adapter_config.training.model_dump(mode="json")
        content = JobContent(trajectories.data_hash(), trajectories.method, content_hash(how))
        if not trains and known is not None and known.status is TrainingStatusEnum.RUNNING:
            await self._recover(name, known, wait=0)
            known = jobs.jobs.get(name)
        if known is not None and (trains or known.status is TrainingStatusEnum.COMPLETED):
            known.content.require(name, content)
            return ref
        progress = ArtProgress(to_art_groups(trajectories))
        step, message = await self.remote_backend.step(), None
        if self._version is not None and (sampled := self._version.number) != step:
            message = (
                f"sampled at step {sampled}, trained from step {step}: an earlier job had ended after all"
            )
        job = ArtJob(content=content, before=step, message=message)
        jobs.put(name, job)
        self._progress[name] = progress
        self._training_jobs[name] = asyncio.create_task(
            self._follow(name, job, progress), name=f"train {name}"
        )
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of the job. A job that was lost with its process is NOT_FOUND."""
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
        """Wait for the end of the job's stream. Ignores `poll_interval`."""
        task = self._training_jobs.get(ref.run_id)
        if task is not None:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return await self.status(ref)

    async def current_version(self) -> ModelVersion | None:
        """Return the version of the current step; None before `initialize`."""
        return self._version

    async def restore(self, version: ModelVersion) -> None:
        """Check that the server's next job starts from `version`, or from a later job of this run.

        Raises TrainingError if not, because ART cannot go back to an earlier step.
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

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Close the job's stream, which stops the server's training."""
        task = self._training_jobs.get(ref.run_id)
        if task is None or task.done():
            return
        task.cancel()
        await asyncio.wait([task])
        self._end(ref.run_id, TrainingStatusEnum.CANCELED, "cancelled")

    async def cleanup(self) -> None:
        """Close the streams and connections. A resumed run finds jobs that the server finishes later."""
        await end_tasks(*self._training_jobs.values())
        await self.remote_backend.close()
        if self._inference is not None:
            await self._inference.close()

    async def _follow(self, name: str, job: ArtJob, progress: ArtProgress) -> None:
        """Read the job's stream to its end, and record the result."""
        error: ArtError | None = None
        try:
            async for line in self.remote_backend.train(progress.given.groups):
                progress.take(line)
                self.log_progress(TrainingJobRef(run_id=name, backend=BACKEND), line)
        except ArtError as failure:
            error = failure
        # A job that the server refused makes no step. After a lost connection, it may still make one.
        wait = 0.0 if error is not None and error.status is not None else RECOVER_SECONDS
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

    async def _recover(self, name: str, job: ArtJob, wait: float) -> None:
        """Mark an earlier process's job as completed, if the model's step shows it within `wait` seconds."""
        step = await self._step_after(job.before, wait)
        if step == job.before + 1:
            message = "the connection was lost; the model's step says that the job was done"
            await self._complete(name, step, {}, message)

    async def _step_after(self, before: int, seconds: float) -> int:
        """Wait up to `seconds` until the model's step is higher than `before`, and return the step."""
        return await _poll_until(seconds, self.remote_backend.step, lambda step: step > before)

    async def _complete(self, name: str, step: int, metrics: dict[str, float], message: str | None) -> None:
        version = await self._served_version(step, name)
        self._version = version
        self._end(name, TrainingStatusEnum.COMPLETED, message, metrics=metrics, version=version)

    def _end(self, name: str, status: TrainingStatusEnum, message: str | None, **facts: Any) -> None:
        jobs = self._require_jobs()
        if (job := jobs.jobs.get(name)) is not None:
            jobs.put(name, job.model_copy(update={"status": status, "message": message, **facts}))
        ref = TrainingJobRef(run_id=name, backend=BACKEND)
        self.log_progress(ref, {"status": status, "message": message})

    async def _served_version(self, step: int, job: str) -> ModelVersion:
        """Return the version of a step, with its served name. Raises ArtError if it is not served."""
        location = await self._served_name(step)
        backend = self.adapter_config.backend
        # ART gives no hash of the weights, so the digest covers their origin.
        digest = content_hash([backend.url, backend.project, backend.name, step, job])
        return ModelVersion(number=step, location=location, digest=digest)

    async def _served_name(self, step: int) -> str:
        """Return the served name: `name@step` (ART 0.5), or `name` (0.4, which swaps its weights)."""
        name = self.adapter_config.backend.name
        names = (f"{name}@{step}", name)
        if self._inference is None:
            return names[0]
        served = await _poll_until(
            RECOVER_SECONDS, self._inference.models, lambda served: bool({*served} & {*names})
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


async def _poll_until(seconds: float, ask: Callable[[], Awaitable[T]], is_there: Callable[[T], bool]) -> T:
    """Poll `ask` until `is_there` accepts the answer or `seconds` have passed, and return the answer.

    Missing answers and server errors are retried for as long. Raises ArtError.
    """
    end = asyncio.get_running_loop().time() + seconds
    while True:
        is_late = asyncio.get_running_loop().time() >= end
        try:
            answer = await ask()
            if is_late or is_there(answer):
                return answer
        except ArtError as error:
            if is_late or (error.status is not None and error.status < 500):
                raise
        await asyncio.sleep(_POLL)


def _problem(job: ArtJob, step: int, progress: ArtProgress, error: ArtError | None) -> str | None:
    """Return why a job whose stream has ended failed; None if it is completed."""
    if step == job.before:
        if error is not None:
            return str(error)
        out_of = f" of {progress.total}" if progress.total else ""
        return (
            f"the server ended the job after {progress.steps}{out_of} gradient steps, and the model is still "
            f"at step {step}"
        )
    if step != job.before + 1:
        return f"the model went from step {job.before} to {step}: something else trains it as well"
    if error is None and not progress.steps:
        return (
            f"the server went on to step {step} without training: it found nothing in the batch to train on "
            "(no group with differing rewards, sequences that are too long, or a server that takes choices "
            "for plain messages, as ART 0.5.17's does)"
        )
    return None
