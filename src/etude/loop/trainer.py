"""The epoch trainer: validate, and then in each epoch collect, choose, train, adopt, and validate again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from etude.config.component import CHANGEABLE
from etude.config.finetuning import FinetuneConfig, TrainerConfig
from etude.config.registry import config_factory, register_trainer
from etude.core.errors import EtudeError
from etude.core.history import History, ValidationEntry
from etude.core.interfaces import Progress, WrongReturnError
from etude.core.job import Skipped, TrainingJobRef, TrainingJobStatus
from etude.core.json_text import json_facts
from etude.core.records import JobDropped
from etude.core.sample import TrajectoryCollection
from etude.core.threads import end_tasks
from etude.loop.bookkeeper import describe, end_run, record_failure, require_trained
from etude.loop.curriculum import with_sets
from etude.loop.interface import Trainer
from etude.loop.metrics import reason_for_skip, reason_to_stop, selection_metrics
from etude.loop.warm_up import run_warm_up
from etude.rollout.phases import collecting_for
from etude.runtime import Runtime
from etude.store.figures import summarize, versions_to_keep


async def run_epochs(
    members: Sequence[EpochTrainer], num_epochs: int, block: FinetuneConfig, runtime: Runtime
) -> list[TrainingJobStatus]:
    """Train all members for `num_epochs` epochs, including the epochs of earlier processes.

    In an epoch, all members collect from the current weights, then all are trained, and then all adopt. With
    `collect_ahead` they collect for the next epoch during training, and adopt when both are done. The loop
    ends early when every member has a reason to stop, or an alarm asks for it. The first member that is due
    runs the episodes of an epoch or validation. The others read them from the journal, scored.

    Raises TrainingError when a job failed, its weights cannot be adopted, or nothing was trained on.
    """
    run, progress = runtime.run, runtime.progress
    several = [member.bookkeeper for member in members]
    progress.run_started(run.name, num_epochs, describe(several))
    for member in members:
        await member.measure_base()
    for member in members:
        await run_warm_up(member.bookkeeper)
    for member in members:
        await member.validate(0)
    for epoch in range(num_epochs):
        is_new = not all(books.is_done(epoch) for books in several)
        if is_new:
            progress.epoch_started(epoch + 1, num_epochs)
            if jobs := await submit_epoch(members, epoch, run.name):
                progress.phase("training")
                ahead = members if block.collect_ahead and epoch + 1 < num_epochs else ()
                await _finish_epoch(jobs, epoch, ahead, run.name, progress)
        if (epoch + 1) % block.run_configuration.validation_interval == 0:
            for member in members:
                await member.validate(epoch + 1)
        if is_new:
            for member in members:
                # Now no later epoch has a job. In a resumed run one may, with weights to adopt.
                await member.prune()
        # An alarm of any member ends the run, or a reason of each.
        last = [member for member in members if epoch + 1 >= len(member.history.epochs)]
        alarms = [*filter(None, (member.bookkeeper.reason_to_stop() for member in last))]
        reasons = [member.reason_to_stop(epoch) for member in members]
        if epoch + 1 < num_epochs and (alarms or None not in reasons):
            why = "; ".join(dict.fromkeys(alarms or filter(None, reasons)))
            progress.message(f"stopped after epoch {epoch + 1}: {why}")
            break
    for member in members:
        await member.validate(len(member.history.epochs))
        # Again, since a process may have been killed after it adopted the last epoch's weights.
        await member.prune()
    await end_run(several, num_epochs, run, progress)
    return require_trained(several)


async def submit_epoch(
    members: Sequence[EpochTrainer], epoch: int, run_id: str
) -> list[tuple[EpochTrainer, TrainingJobRef]]:
    """Collect and submit the epoch of each member that has not done it. Return the members with a job."""
    due = []
    for member in members:
        if member.bookkeeper.is_done(epoch):
            continue
        if (reason := member.runtime.target_config.reason_to_rest(epoch)) is None:
            due.append(member)
        else:
            await member.bookkeeper.rest(epoch, reason)
    if len(members) > 1:
        # All collect first: a model must not be sampled from while it is trained here.
        for member in due:
            await member.prepare_epoch(epoch, run_id)
    jobs: list[tuple[EpochTrainer, TrainingJobRef]] = []
    for member in due:
        with member.bookkeeper.working_on(epoch):
            job = await member.run_epoch(epoch, run_id)
        if isinstance(job, TrainingJobRef):
            jobs.append((member, job))
        elif job is None and epoch in member.bookkeeper.job_counts:
            raise WrongReturnError(
                f"{type(member).__name__}.run_epoch returned None, but it submitted a job; return what "
                "`submit` returned (is a `return` missing?), and resume the run"
            )
        else:
            await member.bookkeeper.skip(epoch, job.reason if job else "run_epoch returned None")
    return jobs


async def _finish_epoch(
    jobs: Sequence[tuple[EpochTrainer, TrainingJobRef]],
    epoch: int,
    ahead: Sequence[EpochTrainer],
    run_id: str,
    progress: Progress,
) -> None:
    """Wait for the epoch's jobs while the members in `ahead` collect for the next epoch. Then adopt."""

    async def collect() -> None:
        for member in ahead:
            if member.runtime.target_config.reason_to_rest(epoch + 1) is None:
                await member.prepare_epoch(epoch + 1, run_id)
        if ahead:
            progress.phase("training")

    collecting = asyncio.ensure_future(collect())
    try:
        following = (member.follow_job(epoch, job) for member, job in jobs)
        outcomes = await asyncio.gather(*following, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not errors:
            await collecting
    finally:
        await end_tasks(collecting)
    if errors and ahead:
        # None adopts before all is collected: a resumed run collects the rest from the same weights.
        raise errors[0]
    for (member, job), outcome in zip(jobs, outcomes, strict=True):
        # One failed job does not make the work of the others void.
        if not isinstance(outcome, BaseException):
            try:
                await member.finish_epoch(epoch, job, outcome)
            except EtudeError as failure:
                errors.append(failure)
    if errors:
        raise errors[0]


class EpochTrainerConfig(TrainerConfig, name="epochs"):
    """The loop over epochs."""

    patience: Annotated[Annotated[int, Field(ge=1)] | None, CHANGEABLE] = None
    """Stop after this many rewards that did not beat the best one: of validations if there are any, else of
    epochs."""
    target_reward: Annotated[float | None, CHANGEABLE] = None
    """Stop when this reward is reached: in validation if there is any, else in the episodes of an epoch."""
    keep_checkpoints: Annotated[Annotated[int, Field(ge=1)] | Literal["all"], CHANGEABLE] = 3
    """How many versions to keep, or `all`. The best are kept: by validation or, without validations, by the
    reward of their training episodes. The last version is always kept too."""
    job_timeout: Annotated[float, CHANGEABLE] = Field(default=86400.0, gt=0)
    """Seconds that a training job may take before it counts as stuck."""
    poll_interval: Annotated[float, CHANGEABLE] = Field(default=5.0, gt=0)
    """Seconds between two checks of a job that runs elsewhere. The first checks come sooner."""


class EpochTrainer(Trainer):
    """Trains one model epoch by epoch. Everything is journalled, so a resumed run repeats nothing."""

    journals_epochs = True

    def __init__(self, trainer_config: EpochTrainerConfig, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self.config = trainer_config
        self._prepared: dict[int, TrainingJobRef | TrajectoryCollection] = {}
        """The existing job of each epoch, or the data to submit."""
        self._refs: dict[int, TrainingJobRef] = {}

    @property
    def history(self) -> History:
        """The epochs and validations of the run so far. Raises EtudeError before `initialize`."""
        return self.bookkeeper.history

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the components, and continue the run where it was left."""
        await super().initialize(run_config)
        self._prepared.clear()
        if self.history.epochs:
            self._take_curriculum_state(self.history.epochs[-1].curriculum_state)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs, including the epochs of earlier processes.

        Raises TrainingError when a job failed, its weights cannot be adopted, or nothing was trained on.
        """
        return await run_epochs([self], num_epochs, self.run_config, self.runtime)

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | Skipped:
        """Collect the episodes of one epoch, choose among them, and submit the rest.

        If a job was submitted before the run was interrupted, it is returned instead.
        """
        await self.prepare_epoch(epoch, run_id)
        selected = self._prepared.pop(epoch)
        if isinstance(selected, TrainingJobRef):
            return selected
        if not len(selected):
            return Skipped(reason=reason_for_skip(await self.bookkeeper.metrics(epoch)))
        return await self.trainer_adapter.submit(selected)

    async def prepare_epoch(self, epoch: int, run_id: str) -> None:
        """Collect and choose the data that `run_epoch` submits, unless that was done."""
        if epoch in self._prepared:
            return
        books, start = self.bookkeeper, self.history.start
        meta = {"epoch": epoch, "run_id": run_id, "begins_from": 0 if start is None else start.number}
        submitted = books.log.state.submissions.get((epoch, 1))
        if submitted is not None and await books.model.is_known(submitted.ref):
            self._take_curriculum_state(submitted.curriculum_state)
            self._prepared[epoch] = submitted.ref
            books.note_job(epoch, 1, submitted.ref)
            return
        await books.sampled_from(epoch)
        started = time.monotonic()
        with books.working_on(epoch):
            await self.trajectory_builder.start_run(run_id=run_id, meta=meta)
            collection = await self.trajectory_builder.finalize(run_id=run_id, meta=meta)
            books.require_waited()
            books.collections.check(collection, epoch)
        seconds = time.monotonic() - started
        self._curriculum_facts = {}
        self._prepared[epoch] = selected = self.apply_curriculum_learning(collection, epoch)
        self._curriculum_facts |= {"collecting_seconds": seconds, **selection_metrics(selected.figures)}

    async def follow_job(self, epoch: int, ref: TrainingJobRef) -> TrainingJobStatus:
        """Wait for the epoch's job. Raises TrainingError when it is not completed."""
        self._refs[epoch] = ref
        books, config = self.bookkeeper, self.config
        async with record_failure(books.log, JobDropped(epoch=epoch)):
            return await books.model.wait(ref, config.job_timeout, config.poll_interval)

    async def finish_epoch(self, epoch: int, ref: TrainingJobRef, status: TrainingJobStatus) -> None:
        """Adopt the weights of the job, and record the epoch."""
        books = self.bookkeeper
        async with record_failure(books.log, JobDropped(epoch=epoch)):
            await books.adopt(epoch, ref, status)
        self.log_progress(epoch, {**self.history.epochs[-1].metrics})

    async def measure_base(self) -> None:
        """Validate the base model once, if a warm-up will follow and there are validation examples."""
        books, past = self.bookkeeper, self.history
        is_to_come = self.run_config.warm_up and not (
            past.warm_up or past.base or books.log.state.warm_up_jobs
        )
        if is_to_come and self.runtime.validation_examples:
            self.runtime.progress.phase("validating", len(self.runtime.validation_examples))
            with collecting_for("warm-up", 0):
                metrics = await self.run_validation_evaluation(0, past.run_id)
            metrics = json_facts(books.with_name(metrics))
            await books.log.add(
                ValidationEntry(epoch=0, metrics=metrics, version=books.model.version, is_of_base=True)
            )
            self.runtime.progress.validated(0, metrics)

    async def validate(self, epoch: int) -> None:
        """Validate the current weights once, if there are validation examples."""
        is_due = epoch == len(self.history.epochs) and self.history.validation(epoch) is None
        if self.runtime.validation_examples and is_due:
            metrics = await self.run_validation_evaluation(epoch, self.history.run_id)
            await self.bookkeeper.record_validation(epoch, metrics)

    async def prune(self) -> None:
        """Delete versions that are not worth keeping and that no opponent plays any more."""
        keep = self.config.keep_checkpoints
        if keep != "all":
            kept = versions_to_keep(self.history, keep)
            kept += [version for pool in self.bookkeeper.opponents for version in pool.members()]
            if self.run_config.collect_ahead:
                # The next epoch's episodes are from the version before the last, and may show it as the best.
                kept += filter(None, (entry.version for entry in self.history.trained_epochs[-2:]))
            await self.bookkeeper.model.adapter.prune(kept)
        for pool in self.bookkeeper.opponents:
            await pool.close_unused(pool.members())

    def reason_to_stop(self, epoch: int) -> str | None:
        """Return why training should end after the epoch, or None."""
        past = self.history.until(epoch + 1)
        reason = reason_to_stop(past, self.config.patience, self.config.target_reward)
        reason = "frozen" if self.runtime.target_config.frozen else reason
        return None if reason is None else self.bookkeeper.by_name(reason)

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Report the metrics, and write the metrics files into the run folder or `output_dir`.

        The builder and the adapter log the same metrics, for the epoch's collection and job.
        """
        self.bookkeeper.report_training(epoch, metrics, output_dir)
        if (ref := self._refs.get(epoch)) is not None:
            self.trajectory_builder.log_progress(self.history.run_id, metrics, output_dir)
            self.trainer_adapter.log_progress(ref, metrics, output_dir)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Return the summary, epochs and validations of this run. Raises ValueError for another run's id."""
        if run_id != self.history.run_id:
            raise ValueError(f"this trainer runs {self.history.run_id!r} and does not know {run_id!r}")
        return {
            **summarize(self.history, self.run_config.num_epochs).as_json(),
            "epochs": [{"epoch": entry.epoch, **entry.metrics} for entry in self.history.epochs],
            "validations": [{"epoch": entry.epoch, **entry.metrics} for entry in self.history.validations],
        }

    async def cleanup(self) -> None:
        """Do nothing: the builder and the adapter are freed around the trainer."""

    def _take_curriculum_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            kept = {key: value for key, value in state.items() if key != "config"}
            self._curriculum_state = with_sets(kept)


register_trainer(config_type=EpochTrainerConfig)(config_factory(EpochTrainer))
