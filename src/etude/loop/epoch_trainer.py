"""The epoch trainer: collect, choose, train, adopt, and again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import FinetuneConfig, TargetConfig
from etude.config.registry import register_trainer
from etude.core.errors import EtudeError, JobStillRunning, TrainingError
from etude.core.history import History
from etude.core.job import TrainingJobRef, TrainingJobStatus
from etude.core.progress import Progress
from etude.core.skipped import Skipped
from etude.core.trajectory import TrajectoryCollection
from etude.groups.line import ModelLine
from etude.loop.config import EpochTrainerConfig
from etude.loop.curriculum import with_sets
from etude.loop.jobs import job_name
from etude.loop.ledger import Ledger
from etude.loop.loop import run_loop
from etude.loop.metrics import finite, selection_metrics
from etude.loop.prepared import Prepared
from etude.loop.record import Record
from etude.loop.staleness import without_stale
from etude.loop.stopping import reason_to_stop
from etude.loop.summary import reason_for_skip, require_trained, summary_of
from etude.loop.trainer import Trainer
from etude.loop.versions import versions_made, versions_to_keep
from etude.loop.warnings import warn
from etude.runtime import Runtime

if TYPE_CHECKING:
    from etude.config.builder import Builder

__all__ = ["EpochTrainer", "EpochTrainerConfig"]


class EpochTrainer(Trainer):
    """Trains one model epoch by epoch. Everything it does is journalled: a resumed run repeats nothing."""

    journals_epochs = True
    target_name: str | None = None
    """Its name among the targets of a run; None where it is the only one."""
    target: TargetConfig = TargetConfig()
    """When it is trained."""

    def __init__(self, trainer_config: EpochTrainerConfig, **kwargs: Any) -> None:
        """Keep the config. Nothing is started here."""
        super().__init__(trainer_config, **kwargs)
        self.config = trainer_config
        self._own_ledger: Ledger | None = None
        self._prepared: dict[int, Prepared] = {}
        self._running: dict[int, Prepared] = {}
        self._refs: dict[int, TrainingJobRef] = {}
        self._training_since = 0.0

    def bind_target(self, name: str, target: TargetConfig) -> None:
        """Be one of several that train in one run, before `initialize`."""
        self.target_name, self.target = name, target

    @property
    def history(self) -> History:
        """What the run has done so far."""
        return History(run_id="") if self._own_ledger is None else self._own_ledger.record.history

    @property
    def ledger(self) -> Ledger:
        """What its parts go through. Raises EtudeError before `initialize`."""
        if self._own_ledger is None:
            raise EtudeError("the trainer was not initialized; call initialize(run_config) first")
        return self._own_ledger

    @property
    def record(self) -> Record:
        """What it keeps of that. Raises EtudeError before `initialize`."""
        return self.ledger.record

    @property
    def line(self) -> ModelLine:
        """The model's versions and jobs. Raises EtudeError before `initialize`."""
        return self.ledger.line

    @property
    def progress(self) -> Progress:
        """Who is told."""
        return self.runtime.progress

    def _make_ledger(
        self,
        runtime: Runtime,
        run_config: FinetuneConfig,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
    ) -> Ledger:
        self._own_ledger = Ledger(
            runtime, run_config, builder, adapter, target_name=self.target_name, target=self.target
        )
        return self._own_ledger

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the components, and take up the run where it was left."""
        await super().initialize(run_config)
        if self.history.epochs:
            self._take_curriculum_state(self.history.epochs[-1].curriculum_state)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs, those of earlier processes included.

        Raises TrainingError when a job failed, the new weights are not alive, or nothing was trained on.
        """
        run_id = self.runtime.run.name
        self.progress.run_started(run_id, num_epochs, self.ledger.describe())
        await run_loop([self], num_epochs, self.run_config, run_id, self.progress)
        summary = summary_of(self.history)
        self.runtime.run.write_json("summary.json", summary)
        self.record.report(final=True)
        self.progress.finished(summary)
        return require_trained([self.history])

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | Skipped:
        """Collect the episodes of one epoch, choose among them, and submit the rest.

        A job that was submitted before the run was interrupted is returned as it is.
        """
        await self.prepare_epoch(epoch, run_id)
        now = self._running[epoch] = self._bounded(epoch, self._prepared.pop(epoch))
        if not isinstance(now.work, TrajectoryCollection):
            return now.work
        return await self.ledger.submit(now.work, metrics=now.metrics, curriculum_state=now.curriculum_state)

    async def prepare_epoch(self, epoch: int, run_id: str) -> None:
        """Collect and choose what `run_epoch` submits, unless that was done."""
        if epoch not in self._prepared:
            self._prepared[epoch] = await self._prepare(epoch, run_id)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The summary, epochs and validations of this run. Raises ValueError for another run's id."""
        if run_id != self.history.run_id:
            raise ValueError(f"this trainer runs {self.history.run_id!r} and knows nothing of {run_id!r}")
        return {
            **summary_of(self.history),
            "epochs": [{"epoch": entry.epoch, **entry.metrics} for entry in self.history.epochs],
            "validations": [{"epoch": entry.epoch, **entry.metrics} for entry in self.history.validations],
        }

    async def cleanup(self) -> None:
        """Free what the builder and the adapter hold; what one of them raises does not stop the other."""
        try:
            await self.trajectory_builder.cleanup()
        finally:
            await self.trainer_adapter.cleanup()

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Report the metrics, and write the metrics files: into the run folder, or `output_dir`.

        The builder and the adapter log the same, about the epoch's collection and job.
        """
        self.progress.trained(epoch + 1, metrics)
        warn(self.history.epochs, self.runtime.run.path, self.progress)
        self.record.report(output_dir=output_dir)
        folder = self.record.folder(output_dir)
        ref = self._refs.get(epoch)
        if ref is not None:
            self.trajectory_builder.log_progress(ref.run_id, metrics, output_dir=str(folder))
            self.trainer_adapter.log_progress(ref, metrics, output_dir=str(folder))

    def is_done(self, epoch: int) -> bool:
        """Whether the epoch is recorded."""
        return self.record.is_done(epoch)

    def reason_to_rest(self, epoch: int) -> str | None:
        """Why the model is not to be trained in the epoch, or None when it is."""
        return self.target.reason_to_rest(epoch)

    def reason_to_stop(self, epoch: int) -> str | None:
        """Why training should end after the epoch, or None."""
        past = self.history.until(epoch + 1)
        reason = reason_to_stop(past, self.config.patience, self.config.target_reward)
        reason = "frozen" if self.target.frozen else reason
        return None if reason is None else self.record.by_name(reason)

    async def follow_job(self, epoch: int, ref: TrainingJobRef) -> TrainingJobStatus:
        """Wait for the epoch's job. Raises TrainingError when it is not completed."""
        self._training_since = time.monotonic()
        self._refs[epoch] = ref
        async with self._or_forgotten(epoch):
            return await self.line.wait(ref, self.config.job_timeout, self.config.poll_interval)

    async def finish_epoch(self, epoch: int, ref: TrainingJobRef, status: TrainingJobStatus) -> None:
        """Adopt the weights that the job made, and record the epoch."""
        async with self._or_forgotten(epoch):
            await self.line.adopt(ref, status)
        version = self.line.version
        metrics = {
            **(await self._work_of(epoch)).metrics,
            "training": (status.metadata or {}).get("metrics", {}),
            "training_seconds": time.monotonic() - self._training_since,
            "model_version": None if version is None else version.number,
        }
        await self._add_epoch(epoch, metrics, status=status)
        self.log_progress(epoch, self.history.epochs[-1].metrics)

    async def skip_epoch(self, epoch: int, skipped: Skipped) -> None:
        """Record that there was nothing to train on."""
        work = await self._work_of(epoch)
        await self._add_epoch(epoch, work.metrics, skipped=skipped.reason)
        self.progress.skipped(epoch + 1, self.record.by_name(skipped.reason))
        warn(self.history.epochs, self.runtime.run.path, self.progress)
        self.record.report()

    async def rest_epoch(self, epoch: int, reason: str) -> None:
        """Record that the model was not trained in the epoch."""
        state = finite(self.get_curriculum_state())
        work = self._running[epoch] = Prepared(Skipped(reason=reason), self.record.with_name({}), state)
        await self._add_epoch(epoch, work.metrics, resting=reason)
        self.record.report()

    async def validate(self, epoch: int) -> None:
        """Evaluate the current weights, once, when there is something to evaluate them on."""
        is_due = epoch == len(self.history.epochs) and not self.record.is_validated(epoch)
        if not self.runtime.validation_examples or not is_due:
            return
        metrics = self.record.with_name(await self.run_validation_evaluation(epoch, self.history.run_id))
        entry = await self.record.add_validation(epoch, metrics, version=self.line.version)
        self.progress.validated(epoch, entry.metrics)
        warn(self.history.validations, self.runtime.run.path, self.progress)
        self.record.report()

    async def prune(self) -> None:
        """Delete versions that are not worth keeping."""
        keep = self.config.keep_checkpoints
        if keep != "all":
            await self.line.prune(versions_to_keep(self.history, keep))

    async def _prepare(self, epoch: int, run_id: str) -> Prepared:
        submitted = self.record.log.submission(epoch)
        if submitted is not None and await self.line.is_known(submitted.ref):
            self._take_curriculum_state(submitted.curriculum_state)
            return Prepared.of(submitted)
        name = job_name(run_id, epoch, self.record.log.attempt(epoch), self.target_name)
        sampled_from = await self.ledger.sampled_from(epoch)
        with self.ledger.working_on(epoch):
            collection, metrics = await self._collect(epoch, name, run_id)
        selected = self.apply_curriculum_learning(collection, epoch)
        metrics |= {**self._curriculum_facts, **selection_metrics(selected)}
        work = selected if len(selected) else Skipped(reason=reason_for_skip(metrics))
        return Prepared(work, finite(metrics), finite(self.get_curriculum_state()), sampled_from)

    async def _collect(
        self, epoch: int, name: str, run_id: str
    ) -> tuple[TrajectoryCollection, dict[str, Any]]:
        started = time.monotonic()
        meta = {"epoch": epoch, "run_id": run_id}
        await self.trajectory_builder.start_run(run_id=name, meta=meta)
        collection = await self.trajectory_builder.finalize(run_id=name, meta=meta)
        self.ledger.check(collection, epoch)
        metrics = self.record.with_name(await self.ledger.metrics(epoch))
        return collection, metrics | {"collecting_seconds": time.monotonic() - started}

    def _bounded(self, epoch: int, prepared: Prepared) -> Prepared:
        """What of it is young enough to be trained on now."""
        work, bound = prepared.work, self.run_config.max_staleness
        if not isinstance(work, TrajectoryCollection):
            return prepared
        made = versions_made(self.history)
        if bound is None or work.method != "grpo":
            return prepared
        kept, dropped = without_stale(work, made, bound)
        metrics = prepared.metrics | {"stale_trajectories": dropped}
        reason = f"all {dropped} trajectories are of weights more than {bound} updates ago (max_staleness)"
        return replace(prepared, work=kept if len(kept) else Skipped(reason=reason), metrics=metrics)

    async def _work_of(self, epoch: int) -> Prepared:
        """What `run_epoch` worked with; of one that a subclass wrote, what the ledger knows of it."""
        if epoch not in self._running:
            submission = self.record.log.submission(epoch)
            metrics = self.record.with_name(await self.ledger.metrics(epoch))
            state = finite(self.get_curriculum_state())
            nothing = Prepared(Skipped(reason="nothing was submitted"), finite(metrics), state)
            self._running[epoch] = nothing if submission is None else Prepared.of(submission)
        return self._running[epoch]

    async def _add_epoch(self, epoch: int, metrics: dict[str, Any], **outcome: Any) -> None:
        work = await self._work_of(epoch)
        await self.record.add_epoch(
            epoch,
            metrics,
            version=self.line.version,
            curriculum_state=work.curriculum_state,
            sampled_from=work.sampled_from,
            **outcome,
        )
        self._running.pop(epoch)
        self.ledger.finished(epoch)

    @asynccontextmanager
    async def _or_forgotten(self, epoch: int) -> AsyncIterator[None]:
        """Forget the epoch's job when it failed, or a resumed run would find it again, and fail again.

        One that may still be running is not forgotten: there must never be two of them.
        """
        try:
            yield
        except JobStillRunning:
            raise
        except TrainingError:
            await self.record.log.forget_submission(epoch)
            raise

    def _take_curriculum_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            kept = {key: value for key, value in state.items() if key != "config"}
            self._curriculum_state = with_sets(kept, like=self._curriculum_state)


@register_trainer(config_type=EpochTrainerConfig)
async def epochs(config: EpochTrainerConfig, builder: Builder) -> AsyncIterator[EpochTrainer]:
    """The registered component `epochs`."""
    yield EpochTrainer(config)
