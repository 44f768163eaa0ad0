"""Fine-tuning jobs through OpenAI's SDK, and the adapter `openai` for jobs at OpenAI."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field

from etude.backends.openai_api import (
    STATES,
    JobsConfig,
    TrainingJobNotFoundClientError,
    api_errors,
    connect,
    job_error,
    latest_metrics,
    retry_reason,
    run_key,
    training_file,
)
from etude.backends.state_folders import JobContent
from etude.backends.trainer_adapter import (
    Capabilities,
    JobHyperparameters,
    TrainerAdapter,
    check_method,
    job_status,
    pauses,
    trained_model,
)
from etude.config.finetuning import FinetuneConfig
from etude.config.registry import register_trainer_adapter
from etude.core.errors import BackendError
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.keys import content_hash, fold
from etude.core.sample import TrajectoryCollection
from etude.core.trajectory import Method
from etude.engines.openai_compatible import OpenAiLlmConfig
from etude.wire.retries import USUAL, with_retries

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.resources.fine_tuning.jobs import AsyncJobs
    from openai.types.fine_tuning import FineTuningJob

    from etude.config.builder import Builder

T = TypeVar("T")

_JOB, _RUN, _VERSION = "etude_job", "etude_run", "etude_version"
"""Metadata keys of a job: the name it was submitted under, that name's run, and the number of the version it
makes."""
_DATA, _METHOD, _TRAINING, _START = "etude_data", "etude_method", "etude_training", "etude_start"
"""Metadata keys for the job's content. The API stores files and hyperparameters in its own form."""

_SEED_SHIFT = 32
"""Keys have 63 bits, and the API's seeds have 31."""
_LONGEST_PAUSE = 60.0
"""The longest pause between two polls, in seconds."""
_OUTAGE_SECONDS = 1800.0
"""Seconds without an answer, after which a run stops waiting for a job."""


class OpenAiJobs(TrainerAdapter):
    """Fine-tuning jobs at the API: upload, creation and polling. Versions are the API's model names.

    Each file and job is looked up before it is created, so that a killed run that resumes pays only once.
    """

    backend: ClassVar[str] = "openai"
    """The backend's name in refs and errors."""
    retry_policy = USUAL
    """When requests are sent again. Nothing is made twice: files and jobs are looked up first."""
    adapter_config: JobsConfig

    def __init__(
        self, adapter_config: JobsConfig, client: AsyncOpenAI, model: str, run_key: str | None = None
    ) -> None:
        """`model` is the API's name of the base model.

        `run_key` separates this run's jobs from others of the same name. Use None if job names are unique at
        the API: every user of it then shares them.
        """
        super().__init__(adapter_config)
        # The SDK's own retries would create a second job or file if only the answer was lost.
        self.client = client.with_options(max_retries=0)
        self._run_key = run_key
        self._start = ModelVersion(number=0, location=model, digest=content_hash(model))
        self._hyperparameters = JobHyperparameters()
        self.metadata: dict[str, str] = {}
        """Additional metadata of each job."""
        self._made: dict[str, ModelVersion] = {}
        """The versions that jobs made, by API job id."""

    @property
    def _api(self) -> AsyncJobs:
        return self.client.fine_tuning.jobs

    async def is_healthy(self) -> bool:
        try:
            await self.check()
        except BackendError as error:
            self.unhealthy_because = str(error)
            return False
        return True

    async def check(self) -> None:
        """Raise BackendError with the API's reason unless it answers and accepts the key."""
        await self._call_api(lambda: self._api.list(limit=1))

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """Set hyperparameters of the next jobs: epochs, rows per step and DPO's beta."""
        hyperparameters.refuse_all_but(("num_epochs", "batch_size", "dpo_beta"), self.backend)
        self._hyperparameters = hyperparameters

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Upload the rows and create a job, unless one with that name and content exists."""
        check_method(f"'{self.backend}'", self.capabilities(), trajectories.method)
        trajectories, options = self.prepare(trajectories)
        name, content = trajectories.run_id, training_file(trajectories)
        request = self._request(name, content, trajectories.method, options)
        known = await self.find(name)
        if known is not None:
            _job_content(known.metadata).require(
                name, _job_content(request["metadata"]), known.fine_tuned_model
            )
            return self._ref(name, known)
        if (skipped := self.reason_to_skip(trajectories, content.count(b"\n"))) is not None:
            return skipped
        job = await self._create(name, request | {"training_file": await self._upload(name, content)})
        self._highest_number = max(self._highest_number, int(request["metadata"][_VERSION]))
        return self._ref(name, job)

    def prepare(self, trajectories: TrajectoryCollection) -> tuple[TrajectoryCollection, dict[str, Any]]:
        """Return the collection to send, for an algorithm that the API knows, and the algorithm's options."""
        own, taken = self.algorithm, {*(self.capabilities().options or ())}
        if own is None or own.type_name != trajectories.method:
            return trajectories, {}
        return trajectories, own.model_dump(mode="json", include=taken)

    def reason_to_skip(self, trajectories: TrajectoryCollection, rows: int) -> Skipped | None:
        """Return why no job should be made on the collection of `rows` rows, if that is already known."""
        return None

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the job's status at the API, with the numbers of its newest step."""
        try:
            job = await self.job(ref)
        except TrainingJobNotFoundClientError as error:
            return job_status(ref, TrainingStatusEnum.NOT_FOUND, message=str(error))
        metrics: dict[str, float] = {}
        with contextlib.suppress(BackendError):  # They can be fetched later.
            events = await self._call_api(lambda: self._api.list_events(job.id, limit=20))
            metrics = latest_metrics(events.data)
        metadata = {"metrics": {**metrics, "trained_tokens": job.trained_tokens}}
        step, total = metrics.get("step"), metrics.get("total_steps")
        progress = min(100.0, 100.0 * step / total) if step is not None and total else None
        state, message, version = STATES.get(job.status, TrainingStatusEnum.RUNNING), job_error(job), None
        if state is TrainingStatusEnum.COMPLETED:
            version, progress = self._made_version(job), 100.0
            if version is None:
                state, message = TrainingStatusEnum.FAILED, f"job {job.id} succeeded but names no model"
        facts = {"progress": progress, "message": message, "metadata": metadata, "version": version}
        return job_status(ref, state, **facts)

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Poll the job, with `pauses` between. Keep polling through a temporary outage of the API.

        Raises BackendError if the outage lasts or the API rejects the key. The job itself continues.
        """
        answered = time.monotonic()
        for pause in pauses(poll_interval, _LONGEST_PAUSE):
            try:
                status = await self.status(ref)
            except BackendError as error:
                silent = time.monotonic() - answered
                if not error.temporary or silent >= _OUTAGE_SECONDS:
                    raise BackendError(
                        f"job {ref.run_id} cannot be followed ({error}). The job continues. Resume the run "
                        "(`etude resume`), or submit the job again under the same name, to follow it."
                    ) from error
            else:
                answered = time.monotonic()
                if status.status.is_final:
                    return status
            await asyncio.sleep(pause)
        raise AssertionError("it keeps being paused")

    async def current_version(self) -> ModelVersion:
        return self._start

    async def restore(self, version: ModelVersion) -> None:
        self._start, self._highest_number = version, max(self._highest_number, version.number)

    async def cancel(self, ref: TrainingJobRef) -> None:
        from openai import BadRequestError, NotFoundError

        async def cancel() -> None:
            job_id = await self._job_id(ref)
            with contextlib.suppress(BadRequestError, NotFoundError):  # It is missing or has ended.
                await self._api.cancel(job_id)

        with contextlib.suppress(TrainingJobNotFoundClientError):
            await self._call_api(cancel)

    async def job(self, ref: TrainingJobRef) -> FineTuningJob:
        """Return the job from the API. Raises TrainingJobNotFoundClientError, BackendError."""
        from openai import NotFoundError

        job_id = await self._job_id(ref)

        async def retrieve() -> FineTuningJob:
            try:
                return await self._api.retrieve(job_id)
            except NotFoundError as error:
                raise TrainingJobNotFoundClientError(job_id) from error

        return await self._call_api(retrieve)

    async def find(self, name: str) -> FineTuningJob | None:
        """Return the latest job submitted under a name, by this process or another."""
        return await self._call_api(lambda: self._find(name))

    async def _find(self, name: str) -> FineTuningJob | None:
        async for job in self._api.list(metadata={_JOB: name}):
            metadata = job.metadata or {}
            if (metadata.get(_JOB), metadata.get(_RUN)) == (name, self._run_key):
                return job
        return None

    async def _upload(self, name: str, content: bytes) -> str:
        """Return the id of a file with this content. Upload it unless it is there already.

        Every attempt looks it up first, because the last attempt may have lost only the answer.
        """
        filename = f"{_job_suffix(name)}-{content_hash(content.decode())[:12]}.jsonl"

        async def upload() -> str:
            async for file in self.client.files.list(purpose="fine-tune"):
                if (file.filename, file.bytes) == (filename, len(content)) and file.status != "error":
                    return file.id
            return (await self.client.files.create(file=(filename, content), purpose="fine-tune")).id

        return await self._call_api(upload)

    async def _call_api(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of requests to the API, which are retried. Raises BackendError."""
        with api_errors(self.client):
            return await with_retries(attempt, retry_reason, self.retry_policy)

    def _request(
        self, name: str, content: bytes, method: Method, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a job's request without its file. The metadata describe the job's content."""
        values = {**options, **self.adapter_config.hyperparameters, **self._hyperparameters.for_api(method)}
        how = {"type": method, method: {"hyperparameters": values}}
        seed = None if self.run_config is None else fold(self.run_config.seed, name) >> _SEED_SHIFT
        metadata = {
            _JOB: name,
            _VERSION: str(max(self._highest_number, self._start.number) + 1),
            _DATA: content_hash(content.decode()),
            _METHOD: method,
            _TRAINING: content_hash([how, seed]),
            _START: self._start.location,
            **({} if self._run_key is None else {_RUN: self._run_key}),
            **self.metadata,
        }
        request = {"model": self._start.location, "method": how, "metadata": metadata}
        return request if seed is None else request | {"seed": seed}

    async def _create(self, name: str, request: dict[str, Any]) -> FineTuningJob:
        """Create the job. Every attempt looks it up first: the last one may have lost only the answer."""
        headers = {"Idempotency-Key": name if self._run_key is None else f"{self._run_key}/{name}"}

        async def create() -> FineTuningJob:
            if (made := await self._find(name)) is not None:
                return made
            return await self._api.create(**request, suffix=_job_suffix(name), extra_headers=headers)

        return await self._call_api(create)

    async def _job_id(self, ref: TrainingJobRef) -> str:
        known = (ref.metadata or {}).get("job_id")
        if known is not None:
            return str(known)
        job = await self.find(ref.run_id)
        if job is None:
            raise TrainingJobNotFoundClientError(ref.run_id)
        return job.id

    def _made_version(self, job: FineTuningJob) -> ModelVersion | None:
        """Return the version that a job made, as the next start. One made elsewhere gets a number."""
        if job.fine_tuned_model is None:
            return None
        if job.id not in self._made:
            text = (job.metadata or {}).get(_VERSION, "")
            number = int(text) if text.isdecimal() else self._highest_number + 1
            # The API gives no hash of the weights, so the job and the model's name replace it.
            digest = content_hash([job.id, job.fine_tuned_model])
            version = ModelVersion(number=number, location=job.fine_tuned_model, digest=digest)
            self._made[job.id] = version
            if number > self._start.number:
                self._start = version
            self._highest_number = max(self._highest_number, number)
        return self._made[job.id]

    def _ref(self, name: str, job: FineTuningJob) -> TrainingJobRef:
        metadata = {"job_id": job.id, "training_file": job.training_file}
        return TrainingJobRef(run_id=name, backend=self.backend, metadata=metadata)


def _job_content(metadata: Mapping[str, str] | None) -> JobContent:
    return JobContent(*((metadata or {}).get(key) for key in (_DATA, _METHOD, _TRAINING, _START)))


def _job_suffix(name: str) -> str:
    """Return a valid model suffix for a job's name: its last 64 characters, where names differ."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)[-64:].lstrip("-_") or "etude"


class OpenAiAdapterConfig(JobsConfig, name="openai"):
    """Train at OpenAI, through its fine-tuning API."""

    min_rows: int = Field(default=10, ge=1)
    """The fewest rows that a job trains on. The API refuses files with fewer."""

    @property
    def epochs(self) -> int:
        """The number of passes over the data: for `auto`, OpenAI's choice for a few hundred rows."""
        given = self.hyperparameters.get("n_epochs", "auto")
        return 3 if given == "auto" else int(given)


class OpenAiAdapter(OpenAiJobs):
    """Jobs at OpenAI: supervised and DPO."""

    adapter_config: OpenAiAdapterConfig

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        await self.check()

    def capabilities(self) -> Capabilities:
        # There is no `grpo`: OpenAI accepts no rewards of others.
        return Capabilities(
            methods=frozenset({"supervised", "dpo"}),
            options=frozenset({"beta"}),
            versions=True,
            from_base=True,
        )

    def reason_to_skip(self, trajectories: TrajectoryCollection, rows: int) -> Skipped | None:
        """Return that there are too few rows, if so."""
        least = self.adapter_config.min_rows
        if rows >= least:
            return None
        return Skipped(reason=f"too little data: {rows} rows, and the API takes {least} or more")

    def charged_tokens(self, trajectories: TrajectoryCollection) -> int:
        """Return an upper bound: the bytes of the training file, with 3 bytes per token."""
        epochs = self._hyperparameters.num_epochs or self.adapter_config.epochs
        return epochs * len(training_file(trajectories)) // 3


@register_trainer_adapter(config_type=OpenAiAdapterConfig)
async def openai(config: OpenAiAdapterConfig, builder: Builder) -> AsyncIterator[OpenAiAdapter]:
    """Yield the adapter of the run's target model. Raises CapabilityError if it is not OpenAI's."""
    llm = trained_model(builder, "openai", OpenAiLlmConfig)
    async with connect(config, llm, needs_key=True) as client:
        yield OpenAiAdapter(config, client, llm.model_name, await run_key(builder))
