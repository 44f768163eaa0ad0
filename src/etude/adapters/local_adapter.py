"""The local backend: jobs run in a thread, versions are folders of the run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.adapters.capabilities import Capabilities
from etude.adapters.local_config import LocalAdapterConfig
from etude.adapters.trainer_adapter import TrainerAdapter
from etude.adapters.versions import VersionFolders
from etude.config.finetuning import FinetuneConfig
from etude.core.call import ChatRequest
from etude.core.errors import EtudeError, RequestError, TrainingError
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.keys import fold
from etude.core.message import OpenAIMessage
from etude.core.trajectory import Method, TrajectoryCollection
from etude.learner.batch import TrainingBatch
from etude.learner.collate import dpo_batch, grpo_batch, supervised_batch
from etude.learner.dpo import Dpo
from etude.learner.grpo import Grpo
from etude.learner.learner import Learner, LearnerOptions, StepReport, TrainingCanceled
from etude.learner.objective import Objective
from etude.learner.sft import Sft
from etude.models.policy import LoraOptions, Policy


@dataclass(slots=True)
class _Job:
    """A job of this process."""

    task: asyncio.Task[ModelVersion]
    canceled: threading.Event = field(default_factory=threading.Event)
    progress: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class LocalAdapter(TrainerAdapter):
    """Trains the policy that the engine samples from, and keeps every version in the run folder.

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
        """The highest version so far: a job from the base model makes the one after it."""
        self._jobs: dict[str, _Job] = {}
        self._learner: Learner | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Put LoRA weights on the model where the config asks for them, and make the optimiser."""
        await super().initialize(run_config)
        lora = self.adapter_config.lora
        if lora is not None:
            modules = tuple(lora.target_modules) if lora.target_modules else None
            try:
                self._policy.use_lora(LoraOptions(lora.r, lora.alpha, modules), fold(self._seed, "lora"))
            except ValueError as error:
                raise RequestError(f"LoRA weights do not fit this model: {error}") from error
        self._policy.keep_base()
        self._learner = Learner(self._policy, self._learner_options(), self._seed)

    def capabilities(self) -> Capabilities:
        """All methods, on token ids."""
        return Capabilities(token_ids_required=True, versions=True, from_base=True)

    async def is_healthy(self) -> bool:
        """Whether `initialize` has been called: there is nothing else that could be away."""
        return self._learner is not None

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Start training in a thread. See `TrainerAdapter.submit`."""
        name = trajectories.run_id
        ref = TrainingJobRef(run_id=name, backend="local")
        if name in self._jobs or self._versions.of_job(name) is not None:
            return ref
        batch = self._batch(trajectories)
        canceled = threading.Event()
        number = max(self._newest, self._policy.version) + 1
        task = asyncio.create_task(
            asyncio.to_thread(self._train, name, number, batch, trajectories.method, canceled)
        )
        self._jobs[name] = _Job(task, canceled)
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where the job stands; jobs that other processes finished are found by their version."""
        job = self._jobs.get(ref.run_id)
        finished = self._versions.of_job(ref.run_id)
        if finished is not None and (job is None or job.task.done()):
            return _status(ref, TrainingStatusEnum.COMPLETED, 100.0, metadata=finished.metadata())
        if job is None:
            return _status(ref, TrainingStatusEnum.NOT_FOUND, message="no such job in this process or folder")
        if not job.task.done():
            return _status(
                ref, TrainingStatusEnum.RUNNING, job.progress, metadata={"metrics": dict(job.metrics)}
            )
        error = None if job.task.cancelled() else job.task.exception()
        if isinstance(error, TrainingCanceled) or job.task.cancelled():
            return _status(ref, TrainingStatusEnum.CANCELED, message=str(error) if error else None)
        return _status(ref, TrainingStatusEnum.FAILED, message=str(error))

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
            path = Path(output_dir) / "local_jobs.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run_id": ref.run_id, **metrics}) + "\n")

    async def current_version(self) -> ModelVersion:
        """The weights in memory."""
        number = self._policy.version
        location = str(self._versions.folder(number)) if number else self._policy.source
        return ModelVersion(number=number, location=location, digest=self._policy.digest())

    async def restore(self, version: ModelVersion) -> None:
        """Go back to `version`, weights and optimiser, so that the next job starts from it."""
        self._newest = max(self._newest, self._policy.version, version.number)
        await asyncio.to_thread(self._restore, version)

    async def prune(self, keep: Collection[ModelVersion]) -> None:
        """Delete the folders of other versions."""
        self._versions.prune({version.number for version in keep})

    async def cancel(self, ref: TrainingJobRef) -> None:
        """Stop the job before its next step."""
        job = self._jobs.get(ref.run_id)
        if job is not None:
            job.canceled.set()
            await asyncio.wait([job.task])

    async def cleanup(self) -> None:
        """Stop jobs that still run."""
        for name in list(self._jobs):
            await self.cancel(TrainingJobRef(run_id=name, backend="local"))

    def _restore(self, version: ModelVersion) -> None:
        self._policy.adopt(self._versions.here(version))
        self._rewind(version.number)

    def _train(
        self, name: str, number: int, batch: TrainingBatch, method: Method, canceled: threading.Event
    ) -> ModelVersion:
        """In a thread: train, and save the new version. Weights go back to what they were on any error."""
        learner, policy = self._require_learner(), self._policy
        start = policy.version
        before = {key: value.detach().clone() for key, value in policy.trainable().items()}
        with policy.lock:
            try:
                metrics = learner.train(batch, self._objective(method), self._on_step(name), canceled)
                version = self._versions.write(name, number, metrics, policy, learner)
            except EtudeError:
                policy.load_tensors(before)
                self._rewind(start)
                raise
            policy.mark_changed(number)
        return version

    def _rewind(self, number: int) -> None:
        """Put the optimiser back to where it was at a version."""
        if number:
            self._require_learner().restore(self._versions.folder(number))
        else:
            self._require_learner().reset()

    def _on_step(self, name: str) -> Any:
        def report(step: StepReport) -> None:
            job = self._jobs.get(name)
            if job is not None:
                job.metrics = dict(step.metrics)
                job.progress = min(100.0, job.progress + 100.0 / step.of)

        return report

    def _batch(self, trajectories: TrajectoryCollection) -> TrainingBatch:
        match trajectories.method:
            case "grpo":
                return grpo_batch(trajectories, self.adapter_config.grpo.advantage_scale)
            case "dpo":
                return dpo_batch(trajectories, self._tokenise)
            case "supervised":
                return supervised_batch(trajectories, self._policy.template.completion_ids)

    def _objective(self, method: Method) -> Objective:
        grpo, dpo = self.adapter_config.grpo, self.adapter_config.dpo
        match method:
            case "grpo":
                return Grpo(grpo.clip_low, grpo.clip_high, grpo.beta, grpo.aggregation, grpo.constant_length)
            case "dpo":
                return Dpo(dpo.beta, dpo.label_smoothing, dpo.reference)
            case "supervised":
                return Sft()

    def _tokenise(
        self, prompt: list[OpenAIMessage] | str, response: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        messages = [OpenAIMessage(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        request = ChatRequest(tuple(message.to_wire() for message in messages))
        ids = self._policy.template.prompt(request).ids
        answer = self._policy.template.completion_ids(response)
        return ids, answer

    def _learner_options(self) -> LearnerOptions:
        config = self.adapter_config
        return LearnerOptions(
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            warmup_steps=config.warmup_steps,
            passes=config.passes,
            batch_size=config.batch_size,
            token_budget=config.token_budget,
        )

    def _require_learner(self) -> Learner:
        if self._learner is None:
            raise TrainingError("the local adapter was not initialized; call initialize(run_config) first")
        return self._learner


def _status(
    ref: TrainingJobRef,
    status: TrainingStatusEnum,
    progress: float | None = None,
    *,
    message: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> TrainingJobStatus:
    return TrainingJobStatus(
        run_id=ref.run_id,
        backend=ref.backend,
        status=status,
        progress=progress,
        message=message,
        metadata=metadata,
    )
