"""Wrappers around the parts of a run that record their work, also for custom parts, and their assembly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from etude.algorithms.algorithm import Algorithm, data_kind
from etude.algorithms.collecting import TrajectoryBuilder
from etude.backends.state_folders import JobNameTakenError
from etude.backends.trainer_adapter import TrainerAdapter, check_run
from etude.config.builder import TargetBuilder
from etude.config.finetuning import FinetuneConfig
from etude.config.import_path import where_raised
from etude.core.data_model import finite, name_type
from etude.core.episode import EpisodeRecord
from etude.core.errors import EtudeError, RequestError, RunStopped, StoreError, TrainingError
from etude.core.evaluation import EvalOutputItem
from etude.core.interfaces import Progress, WrongReturnError, innermost
from etude.core.job import Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.json_text import json_facts
from etude.core.records import JobDropped, JobEnded, Submission
from etude.core.sample import TrajectoryCollection
from etude.loop.bookkeeper import Bookkeeper, describe, end_run, require_trained
from etude.loop.interface import Trainer
from etude.loop.lifecycle import recover
from etude.loop.metrics import selection_metrics
from etude.loop.trainer import EpochTrainer, run_epochs
from etude.loop.warm_up import run_warm_up
from etude.runtime import Runtime
from etude.store.journal import TARGETS


class RecordedPart:
    """A wrapper around a part. All that it does not record is the part's: methods, attributes, and class."""

    _part: Any
    _books: Bookkeeper

    def __init__(self, part: Any, books: Bookkeeper) -> None:
        vars(self).update(_part=part, _books=books)

    @property  # type: ignore[misc]  # `object.__class__` can be set.
    def __class__(self) -> type:
        """The part's class, so that `isinstance` gives the same answers as for the part."""
        return type(self._part)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_part"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._part, name, value)


class RecordedBuilder(RecordedPart):
    """A trajectory builder whose facts about its collections are recorded."""

    async def finalize(self, run_id: str, *args: Any, **kwargs: Any) -> TrajectoryCollection:
        """Return the builder's collection."""
        collection: TrajectoryCollection = await self._part.finalize(run_id, *args, **kwargs)
        self._books.built[self._books.epoch] = collection.figures, self._part.facts(run_id)
        return collection


class RecordedAdapter(RecordedPart):
    """A trainer adapter whose jobs are checked, journalled, made once and followed."""

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start the job of the epoch, or return the job that it has already, under a name made here. Raises
        TrainingError when the data does not come from the weights that it should."""
        books, epoch = self._books, self._books.epoch
        job = books.job_counts.get(epoch, 0) + 1
        try:
            ref = await self._submit_or_follow(trajectories, epoch, job)
        except EtudeError as error:
            books.skip_reasons[epoch], books.failure = str(error), error
            raise
        if isinstance(ref, Skipped):
            books.skip_reasons[epoch] = ref.reason
        else:
            books.note_job(epoch, job, ref)
        return ref

    async def _submit_or_follow(
        self, collection: TrajectoryCollection, epoch: int, job: int
    ) -> TrainingJobRef | Skipped:
        books, log = self._books, self._books.log
        known = log.state.submissions.get((epoch, job))
        if known is not None and (
            known.ref.run_id in log.state.ended or await books.model.is_known(known.ref)
        ):
            return known.ref
        books.require_waited()
        books.collections.check(collection, epoch)
        named = collection.model_copy(update={"run_id": books.job_name(epoch, job)})
        try:
            ref = await books.model.submit(named)
        except JobNameTakenError:
            # A killed process made this job of other data before it could record it. Failed episodes were
            # tried again since.
            await log.add(JobDropped(epoch=epoch, job=job))
            named = collection.model_copy(update={"run_id": books.job_name(epoch, job)})
            ref = await books.model.submit(named)
        if isinstance(ref, TrainingJobRef):
            metrics = {**await books.metrics(epoch), **selection_metrics(collection.figures)}
            state = finite(books.trainer.get_curriculum_state())
            submission = Submission(
                ref=ref, epoch=epoch, job=job, metrics=json_facts(metrics), curriculum_state=state
            )
            await books.sampled_from(epoch)  # Recorded now, before its job's weights are adopted.
            await log.add(submission)
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of a job."""
        return await self._follow_job(ref, lambda: self._part.status(ref))

    async def wait_until_complete(self, ref: TrainingJobRef, *args: Any, **kwargs: Any) -> TrainingJobStatus:
        """Return how a job ended."""
        return await self._follow_job(ref, lambda: self._part.wait_until_complete(ref, *args, **kwargs))

    async def _follow_job(
        self, ref: TrainingJobRef, ask: Callable[[], Awaitable[TrainingJobStatus]]
    ) -> TrainingJobStatus:
        """Return the status of a job, as its backend gives it or, if it is over, as it was recorded.

        For a followed trainer, a job that is newly over has its weights adopted and its epoch recorded.
        """
        if isinstance(ref, Skipped):
            raise TrainingError(
                f"there is no job to ask about, because nothing was submitted: {ref.reason}. Where `submit` "
                "returns an `etude.Skipped`, continue with the next epoch"
            )
        if not hasattr(ref, "run_id"):  # A job's status names it too.
            raise WrongReturnError(
                f"{type(self._part).__name__} was asked about job {ref!r:.60}, but a TrainingJobRef is "
                "expected, as `submit` and `run_epoch` return it (is a `return` missing?)"
            )
        books, log = self._books, self._books.log
        if not books.follows:
            return await ask()
        recorded, started = log.state.ended.get(ref.run_id), books.started_jobs.get(ref.run_id)
        status = books.model.status_after_loss(ref, await ask()) if recorded is None else recorded
        if started is None or not status.status.is_final or status.status is TrainingStatusEnum.NOT_FOUND:
            return status
        epoch, *_ = started
        books.finished_epochs.add(epoch)
        if recorded is None or not books.is_done(epoch):
            if status.status is TrainingStatusEnum.COMPLETED:
                try:
                    entry = await books.adopt(epoch, ref, status)
                except EtudeError as error:
                    books.failure = error
                    raise
                books.report_training(epoch, entry.metrics)
            await books.model.record_job_end(ref, status)
        if ref.run_id not in log.state.ended:
            await log.add(JobEnded(status=status))
        return status


@dataclass(eq=False)
class RecordedTrainer:
    """A trainer in a run, also a custom one. It gets recorded parts; the rest is the trainer's."""

    trainer: Trainer
    builder: TrajectoryBuilder
    adapter: TrainerAdapter
    given: Runtime
    """The runtime of the run. The trainer's own has an evaluation whose collections are recorded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["trainer"], name)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Give the trainer its parts, have it prepare them, and continue the run where it was left.

        Raises CapabilityError when the adapter cannot train on the builder's data, TrainingError when the
        backend is not healthy. Nothing is sampled before that.
        """
        trainer, builder, adapter, runtime = self.trainer, self.builder, self.adapter, self.given
        trainer._books = books = Bookkeeper(runtime, run_config, builder, adapter, trainer)
        parts: Any = RecordedBuilder(builder, books), RecordedAdapter(adapter, books)
        await trainer.bind_components(trajectory_builder=parts[0], trainer_adapter=parts[1])
        if isinstance(builder.trajectory_builder_config, Algorithm):
            adapter.algorithm = builder.trajectory_builder_config.objective()
        trainer.bind_runtime(replace(runtime, evaluation=books.collections))
        builder.bind_runtime(trainer.runtime)
        backend = adapter.adapter_config.type_name or type(adapter).__name__
        capabilities, llms = adapter.capabilities(), runtime.builder.config.llms
        check_run(f"'{backend}'", capabilities, builder, run_config, llms, runtime.target_model)
        engine = innermost(runtime.engines[runtime.target_model])
        lacks = [name for name in ("complete", "adopt", "version") if not hasattr(engine, name)]
        if capabilities.versions and lacks:
            raise RequestError(
                f"the engine of '{runtime.target_model}', {name_type(engine)}, must adopt the versions of "
                f"'{backend}', and has no `{'` and no `'.join(lacks)}`; see docs/extending.md"
            )
        kinds = {builder.method, data_kind(builder.method)}
        builder.token_ids_required = bool(kinds & capabilities.token_ids_for)
        await recover(books)
        await trainer.initialize(run_config)
        await books.take_up()

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Run the trainer, and record the start and the end of the run.

        Raises TrainingError when a job is not over, and WrongReturnError when there are jobs and no statuses.
        Errors that the trainer caught are raised again.
        """
        trainer, books, progress = self.trainer, self.trainer.bookkeeper, self.given.progress
        if trainer.run_config is self.builder.run_config is None:
            raise EtudeError(
                f"{type(trainer).__name__} is not ready for this: call super().initialize(run_config) in "
                "`initialize`, and await it"
            )
        if trainer.journals_epochs:
            statuses = await trainer.run(num_epochs)
            if books.log.state.end is None:  # The loop is the subclass's own.
                await end_run([books], num_epochs, self.given.run, progress)
            return statuses
        progress.run_started(self.given.run.name, num_epochs, describe([books]))
        await run_warm_up(books)
        try:
            statuses = await trainer.run(num_epochs)
        except Exception as error:
            if books.stopped_because is None:
                raise
            if not isinstance(error, RunStopped):  # Or what a trainer made of it.
                progress.message(f"the trainer's own error after the stop: {where_raised(error)}")
            statuses = require_trained([books])
        if books.stopped_because is not None:
            progress.message(f"stopped after epoch {len(books.history.epochs)}: {books.stopped_because}")
        for _, _, ref in [*books.started_jobs.values()]:
            status = await RecordedAdapter(self.adapter, books).status(ref)
            if not status.status.is_final:
                raise TrainingError(
                    f"the trainer returned while job {ref.run_id} is '{status.status}'. Await `trainer_"
                    "adapter.wait_until_complete(ref)` before `run` returns; resume the run to continue"
                )
        if books.failure is not None:
            raise books.failure
        if not statuses and books.started_jobs and books.stopped_because is None:
            raise WrongReturnError(
                f"{type(trainer).__name__}.run returned no status, and {len(books.started_jobs)} jobs were "
                "submitted; return what `wait_until_complete` says of each, and resume the run"
            )
        await end_run([books], num_epochs, self.given.run, progress)
        return statuses or require_trained([books])

    async def cleanup(self) -> None:
        """Stop collecting and free the parts, even if one of them raises. Raises StoreError when the last
        weights cannot be written. Another error is only reported, since it undoes nothing."""
        async with AsyncExitStack() as exits:
            exits.push_async_callback(self._free, self.adapter)
            exits.push_async_callback(self._free, self.builder)
            if self.trainer._books is not None:
                exits.push_async_callback(self.trainer.bookkeeper.collections.stop)
                await self._free(self.trainer)

    async def _free(self, part: Any) -> None:
        try:
            await part.cleanup()
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  user code
            text = f"{type(part).__name__}.cleanup failed: {where_raised(error)}"
            self.given.progress.message(text, warning=True)


async def assemble_trainer(runtime: Runtime) -> RecordedTrainer | RecordedTargets:
    """Return the config's trainer with its builder, its adapter and the runtime. It is not initialized yet.

    With `finetuning.targets`, there is a trainer for each target. Raises RequestError when the config's
    trainer cannot train several.
    """
    targets = runtime.builder.config.finetuning.targets
    if not targets:
        return await _assemble(runtime)
    shared, members = SharedProgress(runtime.progress), dict[str, RecordedTrainer]()
    for name, target in targets.items():
        builder = TargetBuilder(runtime.builder, name)
        own = builder.config.finetuning
        member = replace(
            runtime,
            builder=builder,
            target_model=str(own.target_model),
            target=name,
            target_config=target,
            progress=TargetProgress(shared, name),
        )
        members[name] = await _assemble(member)
        if not isinstance(members[name].trainer, EpochTrainer):
            kind = type(members[name].trainer).__name__
            raise RequestError(
                f"finetuning.trainer '{own.trainer}' is a {kind}, which trains one model; "
                "'finetuning.targets' needs `_type: epochs`, or a trainer that inherits from EpochTrainer"
            )
    return RecordedTargets(members, replace(runtime, progress=shared))


async def _assemble(runtime: Runtime) -> RecordedTrainer:
    # An enabled block names all of these.
    builder = runtime.builder
    block = builder.config.finetuning
    trajectory_builder = await builder.get_trajectory_builder(str(block.trajectory_builder))
    adapter = await builder.get_trainer_adapter(str(block.trainer_adapter))
    trainer: Trainer = await builder.get_trainer(str(block.trainer))
    return RecordedTrainer(trainer, trajectory_builder, adapter, runtime)


@dataclass(eq=False)
class RecordedTargets:
    """Trains the targets of a run together, on one set of episodes per epoch.

    Each has its own `EpochTrainer`, builder, adapter, versions, history and files (`targets/<name>/`). The
    first that is due runs an epoch's episodes, and the others read them from the journal.
    """

    members: Mapping[str, RecordedTrainer]
    """The recorded `EpochTrainer`s by target."""
    runtime: Runtime

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare all targets, and continue the run where it was left."""
        await self.runtime.run.journal.put(TARGETS, list(self.members))
        for name, member in self.members.items():
            await member.initialize(run_config.for_target(name))

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `num_epochs` epochs, including the epochs of earlier processes.

        Raises TrainingError when a job failed, its weights cannot be adopted, or nothing was trained on.
        """
        trainers = [cast("EpochTrainer", member.trainer) for member in self.members.values()]
        block = self.runtime.builder.config.finetuning
        return await run_epochs(trainers, num_epochs, block, self.runtime)

    async def cleanup(self) -> None:
        """Free the resources of the targets, even if one of them raises."""
        async with AsyncExitStack() as exits:
            for member in self.members.values():
                exits.push_async_callback(member.cleanup)


class SharedProgress(Progress):
    """One progress for several targets. It reports once what they share: a target that reads the episodes of
    another one begins the same phase. The rewards are the first target's."""

    def __init__(self, display: Progress) -> None:
        self.display: Progress = display
        self._phase: tuple[str, int | None] | None = None
        self._finished: set[str] = set()
        self._scored: set[tuple[str, int]] = set()
        """The examples and generations whose rewards the phase has reported."""

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        self._phase = None
        self._finished.clear()
        super().epoch_started(epoch, num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        if (name, total) != self._phase:
            self._phase = (name, total)
            self._scored.clear()
            super().phase(name, total)

    def episode_finished(self, episode: EpisodeRecord) -> None:
        if episode.id not in self._finished:
            self._finished.add(episode.id)
            super().episode_finished(episode)

    def scored(self, item: EvalOutputItem) -> None:
        if (item.id, item.generation) not in self._scored:
            self._scored.add((item.id, item.generation))
            super().scored(item)


class TargetProgress(Progress):
    """The progress of one target of a run. Its messages begin with the target's name."""

    def __init__(self, display: Progress, target: str) -> None:
        self.display, self._target = display, target

    def message(self, text: str, *, warning: bool = False) -> None:
        super().message(f"{self._target}: {text}", warning=warning)
