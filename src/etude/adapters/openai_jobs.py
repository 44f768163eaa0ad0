"""Fine-tuning jobs over OpenAI's API, with the official SDK: at OpenAI or a server that speaks like it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from etude.adapters.capabilities import Capabilities, check_method
from etude.adapters.openai_rows import jsonl
from etude.adapters.trainer_adapter import TrainerAdapter, poll_until_final
from etude.config.finetuning import TrainerAdapterConfig
from etude.core.errors import TrainingError
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.keys import content_hash
from etude.core.skipped import Skipped
from etude.core.trajectory import Method, TrajectoryCollection

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

_STATES = {
    "validating_files": TrainingStatusEnum.PENDING,
    "queued": TrainingStatusEnum.PENDING,
    "running": TrainingStatusEnum.RUNNING,
    "succeeded": TrainingStatusEnum.COMPLETED,
    "failed": TrainingStatusEnum.FAILED,
    "cancelled": TrainingStatusEnum.CANCELED,
}
_JOB, _VERSION = "etude_job", "etude_version"
"""In the metadata of a job: the name it was submitted under, and the number of the version it makes."""

_DAILY_LIMIT = "daily_rate_limit_exceeded"
_MAX_SUFFIX = 64


class TrainingJobNotFoundClientError(TrainingError):
    """There is no such job: none was created, or the backend does not know it."""

    def __init__(self, job_id: str | None) -> None:
        told = "no job was created yet" if job_id is None else f"the backend knows no job {job_id}"
        super().__init__(f"training job not found: {told}")
        self.job_id = job_id


class OpenAiJobsConfig(TrainerAdapterConfig):
    """How jobs are made."""

    n_epochs: int | Literal["auto"] = Field(
        default="auto", description="Times that a job goes over its data."
    )
    learning_rate_multiplier: float | Literal["auto"] = Field(
        default="auto", description="Factor of the default."
    )
    beta: float | Literal["auto"] = Field(
        default="auto", description="How hard preferences pull away from the reference, in DPO."
    )
    min_rows: int = Field(default=10, ge=1, description="The API refuses training files with fewer rows.")
    daily_limit_wait: float = Field(
        default=3600.0, gt=0, description="Seconds until the next try when the day's jobs are used up."
    )
    daily_limit_tries: int = Field(default=25, ge=1, description="Tries before that is an error.")


class OpenAiJobs(TrainerAdapter):
    """Uploads training files, makes jobs of them, and follows these. Versions are the API's model names."""

    adapter_config: OpenAiJobsConfig

    def __init__(self, adapter_config: OpenAiJobsConfig, client: AsyncOpenAI, model: str) -> None:
        """`model` is the API's name of the base model."""
        super().__init__(adapter_config)
        self.client = client
        self._start = ModelVersion(number=0, location=model, digest=content_hash(model))
        self._newest = 0

    def capabilities(self) -> Capabilities:
        """What the API can be given as text."""
        methods: frozenset[Method] = frozenset({"supervised", "dpo"})
        return Capabilities(methods=methods, versions=True, from_base=True)

    async def is_healthy(self) -> bool:
        """Whether the API answers, and takes the key."""
        from openai import APIError

        try:
            await self.client.fine_tuning.jobs.list(limit=1)
        except APIError:
            return False
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Upload the rows and make a job of them. See `TrainerAdapter.submit`."""
        check_method("'openai'", self.capabilities(), trajectories.method, "of this run")
        name = trajectories.run_id
        known = await self.find(name)
        if known is not None:
            return _ref(name, known)
        if len(trajectories) < self.adapter_config.min_rows:
            least = self.adapter_config.min_rows
            return Skipped(
                reason=f"too little data: {len(trajectories)} rows, and the API takes {least} or more"
            )
        content = jsonl(trajectories)
        with _api_errors():
            file = await self.client.files.create(file=(f"{name}.jsonl", content), purpose="fine-tune")
            return _ref(name, await self._create(name, file.id, trajectories.method))

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where the job stands at the API."""
        try:
            job = await self.job(ref)
        except TrainingJobNotFoundClientError as error:
            return TrainingJobStatus(
                run_id=ref.run_id,
                backend=ref.backend,
                status=TrainingStatusEnum.NOT_FOUND,
                message=str(error),
            )
        state = _STATES.get(job.status, TrainingStatusEnum.RUNNING)
        metadata: dict[str, Any] = {"metrics": {"trained_tokens": job.trained_tokens}}
        message = error_repr(job)
        if state is TrainingStatusEnum.COMPLETED:
            version = _version_of(job)
            if version is None:
                state, message = TrainingStatusEnum.FAILED, f"job {job.id} succeeded and names no model"
            else:
                metadata["model_version"] = version.model_dump(mode="json")
                self._go_on_from(version)
        return TrainingJobStatus(
            run_id=ref.run_id, backend=ref.backend, status=state, message=message, metadata=metadata
        )

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Ask every `poll_interval` seconds."""
        return await poll_until_final(lambda: self.status(ref), poll_interval)

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append the facts to `openai_jobs.jsonl` in `output_dir`; nothing without one."""
        if output_dir is not None:
            path = Path(output_dir) / "openai_jobs.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run_id": ref.run_id, **metrics}) + "\n")

    async def current_version(self) -> ModelVersion:
        """The model that the next job starts from."""
        return self._start

    async def restore(self, version: ModelVersion) -> None:
        """Start the next job from `version`; numbers go on from the highest so far."""
        self._start, self._newest = version, max(self._newest, version.number)

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Stop the job if it still runs."""
        from openai import APIStatusError

        try:
            await self.client.fine_tuning.jobs.cancel(await self._id(ref))
        except (APIStatusError, TrainingJobNotFoundClientError):
            return  # It is not there, or over: what was wanted.

    async def job(self, ref: TrainingJobRef) -> FineTuningJob:
        """The job as the API tells it. Raises TrainingJobNotFoundClientError."""
        from openai import NotFoundError

        job_id = await self._id(ref)
        with _api_errors():
            try:
                return await self.client.fine_tuning.jobs.retrieve(job_id)
            except NotFoundError as error:
                raise TrainingJobNotFoundClientError(job_id) from error

    async def find(self, name: str) -> FineTuningJob | None:
        """The job that was submitted under a name, by this process or another; the latest of several."""
        with _api_errors():
            async for job in self.client.fine_tuning.jobs.list(metadata={_JOB: name}):
                if (job.metadata or {}).get(_JOB) == name:
                    return job
        return None

    async def events(self, ref: TrainingJobRef) -> list[FineTuningJobEvent]:
        """What the API tells of the job's progress, oldest first. Raises TrainingJobNotFoundClientError."""
        job_id = await self._id(ref)
        with _api_errors():
            return [event async for event in self.client.fine_tuning.jobs.list_events(job_id)][::-1]

    async def _create(self, name: str, file_id: str, method: Method) -> FineTuningJob:
        """Raises TrainingError when the day's jobs stay used up."""
        from openai import RateLimitError

        config = self.adapter_config
        request: dict[str, Any] = {
            "model": self._start.location,
            "training_file": file_id,
            "method": self._method(method),
            "suffix": re.sub(r"[^A-Za-z0-9_-]+", "-", name)[-_MAX_SUFFIX:],
            "metadata": {_JOB: name, _VERSION: str(max(self._newest, self._start.number) + 1)},
        }
        for _ in range(config.daily_limit_tries):
            try:
                return await self.client.fine_tuning.jobs.create(**request)
            except RateLimitError as error:
                if error.code != _DAILY_LIMIT:
                    raise
            await asyncio.sleep(config.daily_limit_wait)
        raise TrainingError(
            f"job {name}: the day's fine-tuning jobs were used up at all {config.daily_limit_tries} tries. "
            "Nothing that was collected is lost; resume the run to try again."
        )

    def _method(self, method: Method) -> dict[str, Any]:
        config = self.adapter_config
        parameters: dict[str, Any] = {
            "n_epochs": config.n_epochs,
            "learning_rate_multiplier": config.learning_rate_multiplier,
        }
        if method == "dpo":
            parameters["beta"] = config.beta
        return {"type": method, method: {"hyperparameters": parameters}}

    async def _id(self, ref: TrainingJobRef) -> str:
        known = (ref.metadata or {}).get("job_id")
        if known is not None:
            return str(known)
        job = await self.find(ref.run_id)
        if job is None:
            raise TrainingJobNotFoundClientError(ref.run_id)
        return job.id

    def _go_on_from(self, version: ModelVersion) -> None:
        if version.number > self._newest:
            self._start, self._newest = version, version.number


@contextmanager
def _api_errors() -> Iterator[None]:
    """What the SDK raises, as an error of a run."""
    from openai import APIError

    try:
        yield
    except APIError as error:
        raise TrainingError(f"the fine-tuning API: {type(error).__name__}: {error.message}") from error


def error_repr(job: FineTuningJob) -> str | None:
    """`Code: c. Message: m. Parameter: p.` of a job that failed; None of others."""
    error = job.error
    if error is None or not (error.code or error.message):
        return None
    told = f"Code: {error.code}. Message: {error.message}."
    return f"{told} Parameter: {error.param}." if error.param else told


def _ref(name: str, job: FineTuningJob) -> TrainingJobRef:
    metadata = {"job_id": job.id, "training_file": job.training_file}
    return TrainingJobRef(run_id=name, backend="openai", metadata=metadata)


def _version_of(job: FineTuningJob) -> ModelVersion | None:
    if job.fine_tuned_model is None:
        return None
    number = int((job.metadata or {}).get(_VERSION, "1"))
    # The API tells no hash of the weights; that of the job's model name is what can be known.
    digest = content_hash([job.id, job.fine_tuned_model])
    return ModelVersion(number=number, location=job.fine_tuned_model, digest=digest)
