"""The epoch trainer: collect, choose, train, adopt, and again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from etude.config.finetuning import FinetuneConfig, TrainerConfig
from etude.config.registry import register_trainer
from etude.core.errors import TrainingError
from etude.core.history import EpochEntry, History, ValidationEntry
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.progress import Progress
from etude.core.skipped import Skipped
from etude.core.trajectory import TrajectoryCollection
from etude.epochs.jobs import job_name, renamed, require_completed, version_of, wait_for
from etude.epochs.log import EpochLog, Submission
from etude.epochs.metrics import collection_metrics, finite, selection_metrics
from etude.epochs.stopping import reason_to_stop
from etude.epochs.summary import reason_for_skip, summary_of
from etude.epochs.versions import (
    check_adopted,
    check_changed,
    check_sampled_from,
    last_version,
    versions_to_keep,
)
from etude.trainer import Trainer

if TYPE_CHECKING:
    from etude.config.builder import Builder


class EpochTrainerConfig(TrainerConfig, name="epochs"):
    """The loop over epochs."""

    patience: int | None = Field(
        default=None,
        ge=1,
        description="Stop after this many rewards that did not beat the best: of validations where there "
        "are any, else of epochs.",
    )
    target_reward: float | None = Field(
        default=None, description="Stop when this reward is reached: in validation where there is any."
    )
    keep_checkpoints: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        default=3,
        description="How many of the best versions to keep, or `all`; the last one is always kept too.",
    )
    job_timeout: float = Field(
        default=86400.0, gt=0, description="Seconds that a training job may take before it counts as stuck."
    )
    poll_interval: float = Field(
        default=5.0, gt=0, description="Seconds between two looks at a job that runs elsewhere."
    )


class EpochTrainer(Trainer):
    """Trains epoch by epoch. Everything it does is journalled: a resumed run repeats nothing."""

    def __init__(self, trainer_config: EpochTrainerConfig, **kwargs: Any) -> None:
        """Keep the config. Nothing is started here."""
        super().__init__(trainer_config, **kwargs)
        self.config = trainer_config
        self._history = History(run_id="")
        self._version: ModelVersion | None = None
        self._metrics: dict[str, Any] = {}

    @property
    def history(self) -> History:
        """What the run has done so far."""
        return self._history

    @property
    def progress(self) -> Progress:
        """Who is told."""
        return self.runtime.progress

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the components, and take up the run where it was left."""
        await super().initialize(run_config)
        if not await self.trainer_adapter.is_healthy():
            kind = self.trainer_adapter.adapter_config.type_name
            raise TrainingError(f"the training backend '{kind}' is not healthy; nothing was sampled yet")
        self._log = EpochLog(self.runtime.run.journal)
        self._history = self._log.history(self.runtime.run.name)
        await self._take_up()

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs, those of earlier processes included.

        Raises TrainingError when a job failed, the new weights are not alive, or nothing was trained on.
        """
        run_id = self.runtime.run.name
        self.progress.run_started(run_id, num_epochs, self._facts())
        await self._validate(0)
        for epoch in range(num_epochs):
            if not self._is_done(epoch):
                job = await self.run_epoch(epoch, run_id)
                await (self._skip(epoch, job) if isinstance(job, Skipped) else self._train(epoch, job))
            if (epoch + 1) % self.run_config.run_configuration.validation_interval == 0:
                await self._validate(epoch + 1)
            await self._prune()
            past = self._history.until(epoch)
            reason = reason_to_stop(past, self.config.patience, self.config.target_reward)
            if reason is not None:
                self.progress.message(f"stopped after epoch {epoch + 1}: {reason}")
                break
        await self._validate(len(self._history.epochs))
        return self._finish()

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | Skipped:
        """Collect the episodes of one epoch, choose among them, and submit the rest.

        A job that was submitted before the run was interrupted is returned as it is.
        """
        self.progress.epoch_started(epoch, self.run_config.num_epochs)
        submitted = self._log.submission(epoch)
        if submitted is not None and await self._is_known(submitted.ref):
            self._take_curriculum_state(submitted.curriculum_state)
            return submitted.ref
        name = job_name(run_id, epoch, self._log.attempt(epoch))
        collection = await self._collect(epoch, name, run_id)
        selected = self.apply_curriculum_learning(collection, epoch)
        self._metrics |= {**self._curriculum_facts, **selection_metrics(selected)}
        if not len(selected):
            return Skipped(reason=reason_for_skip(self._metrics))
        return await self._submit(epoch, selected)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The summary, epochs and validations of this run. Raises ValueError for another run's id."""
        if run_id != self._history.run_id:
            raise ValueError(f"this trainer runs {self._history.run_id!r} and knows nothing of {run_id!r}")
        return {
            **summary_of(self._history),
            "epochs": [{"epoch": entry.epoch, **entry.metrics} for entry in self._history.epochs],
            "validations": [{"epoch": entry.epoch, **entry.metrics} for entry in self._history.validations],
        }

    async def cleanup(self) -> None:
        """Free what the builder and the adapter hold; what one of them raises does not stop the other."""
        try:
            await self.trajectory_builder.cleanup()
        finally:
            await self.trainer_adapter.cleanup()

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Tell who watches, and write the metrics files: into the run folder, or `output_dir`."""
        self.progress.trained(epoch, metrics)
        self._report(output_dir=output_dir)

    async def _take_up(self) -> None:
        """Let the adapter and the engine go on from the last version, if there is one."""
        last = last_version(self._history)
        if last is None:
            self._version = await self.trainer_adapter.current_version()
        else:
            await self.trainer_adapter.restore(last)
            await self._sample_from(last)
        if self._history.epochs:
            self._take_curriculum_state(self._history.epochs[-1].curriculum_state)

    async def _collect(self, epoch: int, name: str, run_id: str) -> TrajectoryCollection:
        started = time.monotonic()
        meta = {"epoch": epoch, "run_id": run_id}
        await self.trajectory_builder.start_run(run_id=name, meta=meta)
        collection = await self.trajectory_builder.finalize(run_id=name, meta=meta)
        facts = self.trajectory_builder.facts(name)
        check_sampled_from(self._version, facts.get("model_versions", {}), epoch)
        self._metrics = collection_metrics(collection, facts)
        self._metrics["collecting_seconds"] = time.monotonic() - started
        return renamed(collection, name)

    async def _submit(self, epoch: int, selected: TrajectoryCollection) -> TrainingJobRef | Skipped:
        ref = await self.trainer_adapter.submit(selected)
        if isinstance(ref, TrainingJobRef):
            state = finite(self.get_curriculum_state())
            await self._log.add_submission(
                epoch, Submission(ref=ref, metrics=finite(self._metrics), curriculum_state=state)
            )
        return ref

    async def _train(self, epoch: int, ref: TrainingJobRef) -> None:
        """Follow the job to its end, adopt the weights it made, and record the epoch."""
        self.progress.phase("training")
        started = time.monotonic()
        submitted, before = self._log.submission(epoch), self._version
        try:
            status = await wait_for(
                self.trainer_adapter, ref, self.config.job_timeout, self.config.poll_interval
            )
            require_completed(ref, status)
            await self._adopt(ref, status)
        except TrainingError:
            # Or a resumed run would find the same job again, and fail again.
            await self._log.forget_submission(epoch)
            raise
        metrics = {
            **(self._metrics if submitted is None else submitted.metrics),
            "training": (status.metadata or {}).get("metrics", {}),
            "training_seconds": time.monotonic() - started,
            "model_version": None if self._version is None else self._version.number,
        }
        await self._record(epoch, metrics, sampled_from=before, status=status)

    async def _skip(self, epoch: int, skipped: Skipped) -> None:
        await self._record(epoch, self._metrics, sampled_from=self._version, skipped=skipped.reason)

    async def _record(self, epoch: int, metrics: dict[str, Any], **outcome: Any) -> None:
        entry = EpochEntry(
            epoch=epoch,
            timestamp=_now(),
            metrics=finite(metrics),
            version=self._version,
            curriculum_state=finite(self.get_curriculum_state()),
            **outcome,
        )
        await self._log.add_epoch(entry)
        self._history = self._history.with_epoch(entry)
        if entry.skipped is None:
            self.log_progress(epoch, entry.metrics)
        else:
            self.progress.skipped(epoch, entry.skipped)
            self._report()

    async def _adopt(self, ref: TrainingJobRef, status: TrainingJobStatus) -> None:
        """Sample from the new weights from now on, and make sure that they are new and sampled from."""
        version = version_of(status, self.trainer_adapter.capabilities().versions, ref)
        if version is None:
            self.progress.message(
                f"{ref.backend} does not say what weights it made: it cannot be checked that they changed, "
                "nor that the next episodes are sampled from them",
                warning=True,
            )
            return
        check_changed(self._version, version, ref.run_id)
        await self._sample_from(version)

    async def _sample_from(self, version: ModelVersion) -> None:
        model = self.runtime.target_model
        engine = self.runtime.engines[model]
        await engine.adopt(version)
        check_adopted(engine.version, version, model)
        self._version = version

    async def _validate(self, epoch: int) -> None:
        """Evaluate the current weights, once, when there is something to evaluate them on."""
        known = {entry.epoch for entry in self._history.validations}
        if not self.runtime.validation_examples or epoch in known or epoch != len(self._history.epochs):
            return
        metrics = finite(await self.run_validation_evaluation(epoch, self._history.run_id))
        entry = ValidationEntry(epoch=epoch, timestamp=_now(), metrics=metrics, version=self._version)
        await self._log.add_validation(entry)
        self._history = self._history.with_validation(entry)
        self.progress.validated(epoch, metrics)
        self._report()

    async def _prune(self) -> None:
        keep = self.config.keep_checkpoints
        if keep != "all":
            await self.trainer_adapter.prune(versions_to_keep(self._history, keep))

    async def _is_known(self, ref: TrainingJobRef) -> bool:
        """Whether the backend still has the job; an in-process job is gone with its process."""
        return (await self.trainer_adapter.status(ref)).status is not TrainingStatusEnum.NOT_FOUND

    def _finish(self) -> list[TrainingJobStatus]:
        """Write the summary; the statuses of the jobs. Raises TrainingError when there were none."""
        summary = summary_of(self._history)
        self.runtime.run.write_json("summary.json", summary)
        self._report(final=True)
        self.progress.finished(summary)
        statuses = [entry.status for entry in self._history.trained if entry.status is not None]
        if not statuses:
            reasons = " | ".join(summary["skip_reasons"])
            raise TrainingError(
                f"the run trained on nothing in {len(self._history.epochs)} epochs. {reasons}"
            )
        return statuses

    def _report(self, *, output_dir: str | None = None, final: bool = False) -> None:
        if self.runtime.report is not None:
            folder = self.runtime.run.path if output_dir is None else Path(output_dir)
            self.runtime.report(self._history, folder, final)

    def _is_done(self, epoch: int) -> bool:
        return any(entry.epoch == epoch for entry in self._history.epochs)

    def _take_curriculum_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self._curriculum_state = {key: value for key, value in state.items() if key != "config"}

    def _facts(self) -> dict[str, Any]:
        return {
            "folder": str(self.runtime.run.path),
            "examples": len(self.runtime.examples),
            "validation_examples": len(self.runtime.validation_examples),
            "target_model": self.runtime.target_model,
            "trajectory_builder": self.trajectory_builder.trajectory_builder_config.type_name,
            "trainer_adapter": self.trainer_adapter.adapter_config.type_name,
            "epochs_done": len(self._history.epochs),
        }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@register_trainer(config_type=EpochTrainerConfig)
async def epochs(config: EpochTrainerConfig, builder: Builder) -> AsyncIterator[EpochTrainer]:
    """The registered component `epochs`."""
    yield EpochTrainer(config)
