"""The bookkeeper: checks and records the work of a trainer and its parts, also of custom ones."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from etude.algorithms.algorithm import data_kind
from etude.algorithms.collecting import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import FinetuneConfig
from etude.core.data_model import finite
from etude.core.errors import EtudeError, JobStillRunning, RunStopped, TrainingError
from etude.core.evaluation import EvalOutput
from etude.core.history import AlarmEvent, Entry, EpochEntry, History, ValidationEntry
from etude.core.interfaces import Progress, innermost
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.json_text import json_facts
from etude.core.records import JobDropped, JobEnded, MetricsAdded, Record, RunEnded, SampledFrom
from etude.core.sample import GroupFigures
from etude.groups.agents import ModelSettings
from etude.groups.model_jobs import ModelJobs
from etude.groups.opponents import OpponentPool
from etude.loop.alarms import PAGE, active_alarms, alarm_events
from etude.loop.collections import Collections, TargetWatch
from etude.loop.metrics import call_metrics, collection_metrics, reason_for_skip, selection_metrics
from etude.rollout.phases import collecting_for, current_number
from etude.runtime import Runtime
from etude.store.figures import best_version, causes_in, last_version, show_command, summary_in, versions_made
from etude.store.files import private_folder
from etude.store.journal import ModelLog
from etude.store.run_folder import RunFolder

E = TypeVar("E", EpochEntry, ValidationEntry)


class Bookkeeper:
    """Hands out fresh episodes, checks submitted data, and makes and records each job once.

    A trainer's builder collects through `collections`, and the adapter that it gets leads here.
    `EpochTrainer` tells what became of an epoch. For any other trainer, the bookkeeper `follows` the jobs
    that it submits and asks after, and adopts a job's weights when the trainer learns that it is completed.
    Such a run is resumed by doing the same again, with episodes and jobs from the journal.
    """

    failure: EtudeError | None = None
    """Why data was refused or weights were not adopted, even if the trainer caught the error."""
    stopped_because: str | None = None
    """The alarm that has ended the run, once the trainer knows."""
    _latest = 0

    def __init__(
        self,
        runtime: Runtime,
        config: FinetuneConfig,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
        trainer: Any,
    ) -> None:
        """`trainer` is an `etude.Trainer`. `runtime` says which target this model is."""
        self.runtime = runtime
        self.config = config
        self.builder = builder
        self.adapter = adapter
        self.trainer = trainer
        self.follows = not trainer.journals_epochs
        self.target = runtime.target
        self.log = ModelLog(runtime.run.journal, self.target)
        self.alarms = active_alarms(config)
        self._logged: dict[int, dict[str, Any]] = {}
        """Metrics that arrived for epochs that are not recorded yet."""
        self._ringing: list[tuple[Entry, AlarmEvent]] = []
        """Alarms that are recorded, but not reported yet."""
        warn = partial(runtime.progress.message, warning=True)
        model, frozen = runtime.target_model, runtime.target_config.frozen
        self.model = ModelJobs(
            model,
            adapter,
            runtime.engines[model],
            self.log,
            settings=ModelSettings(model, frozen, config.fine_tune_from_scratch),
            warn=warn,
            watchdog=runtime.watchdog,
            ledger=runtime.ledger,
        )
        self._progress = runtime.progress
        self.collections = Collections(
            runtime.evaluation,
            model,
            epoch=lambda: self.epoch,
            before=self.require_not_stopped,
            versions=lambda: (self.model.version, versions_made(self.history)),
            ahead=int(config.collect_ahead),
            targets=TargetWatch(config.target_functions, model, warn, runtime.target),
        )
        pools = [each for each in map(innermost, runtime.engines.values()) if isinstance(each, OpponentPool)]
        self.opponents = [pool for pool in pools if pool.config.of == model]
        for pool in self.opponents:
            pool.follow(self.log)
        self.built: dict[int, tuple[Sequence[GroupFigures], dict[str, Any]]] = {}
        """For each epoch: the figures of the builder's finished collection, and its facts about that."""
        self.job_counts: dict[int, int] = {}
        """How many jobs this process has submitted for an epoch, or found submitted."""
        self.started_jobs: dict[str, tuple[int, float, TrainingJobRef]] = {}
        """These jobs by name, each with its epoch, and when the trainer submitted it."""
        self.finished_epochs: set[int] = set()
        """The epochs that a followed trainer has finished."""
        self.skip_reasons: dict[int, str] = {}
        """Why nothing was submitted for an epoch."""
        self._visited: set[int] = set()

    @property
    def epoch(self) -> int:
        """The epoch that is being worked on, from 0; outside of `run_epoch`, the latest without a job."""
        inside = current_number("train")
        return self._latest + (self._latest in self.job_counts) if inside is None else inside

    @contextmanager
    def working_on(self, epoch: int) -> Iterator[None]:
        """Collect for an epoch and submit its job in the block."""
        self._latest = epoch
        with collecting_for("train", epoch):
            yield

    def note_job(self, epoch: int, job: int, ref: TrainingJobRef) -> None:
        """Note the `job`-th job of an epoch, which was submitted now or is known from before."""
        self._latest, self.job_counts[epoch] = epoch, job
        self.started_jobs.setdefault(ref.run_id, (epoch, time.monotonic(), ref))
        if self.follows and ref.run_id not in self.log.state.ended:
            self._progress.phase("training")

    def require_waited(self) -> None:
        """Raise TrainingError if a job is still to be waited for."""
        running = next((name for name in self.started_jobs if name not in self.log.state.ended), None)
        is_ahead = self.config.collect_ahead or self.model.version is None
        if running is not None and self.failure is None and not is_ahead:
            by_hand = "finish_epoch(epoch, ref, await self.follow_job(epoch, ref))"
            how = "trainer_adapter.wait_until_complete(ref)" if self.follows else by_hand
            raise TrainingError(
                f"job {running} was not awaited, so its weights are not in use yet. Await it before the next "
                f"epoch and the next job: `await self.{how}`"
            )

    async def take_up(self) -> None:
        """Continue where the run was left. Raises TrainingError when the backend is not healthy."""
        if not await self.adapter.is_healthy():
            kind = self.adapter.adapter_config.type_name or type(self.adapter).__name__
            why = f" ({self.adapter.unhealthy_because})" if self.adapter.unhealthy_because else ""
            raise TrainingError(f"the training backend '{kind}' is not healthy; nothing was sampled yet{why}")
        await self.model.take_up(last_version(self.history))
        if (start := self.history.start) is not None:
            await self.adapter.begin_from(start)
        # The last job is submitted again if it failed.
        known = self.log.state
        for epoch, job in sorted(known.submissions)[-1:]:
            status = known.ended.get(known.submissions[epoch, job].ref.run_id)
            if status is not None and status.status is not TrainingStatusEnum.COMPLETED:
                await self.log.add(JobDropped(epoch=epoch, job=job))

    async def begin(self, epoch: int) -> int:
        """Begin `run_epoch` and return its epoch's number, a new one if the trainer repeats a number.

        Raises RunStopped if an alarm has ended the run.
        """
        if epoch in self._visited:
            epoch = max(self._visited) + 1
        self.require_not_stopped(epoch)
        self._visited.add(epoch)
        if not self.is_done(epoch):
            self._progress.epoch_started(epoch + 1, self.config.num_epochs)
            self._progress.phase("collecting")
        return epoch

    async def end(self, epoch: int, outcome: object) -> None:
        """End `run_epoch`. If it made no job, record that there was nothing to train on."""
        if epoch in self.job_counts:
            return
        self.finished_epochs.add(epoch)
        if self.is_done(epoch):
            return
        reason = outcome.reason if isinstance(outcome, Skipped) else self.skip_reasons.get(epoch)
        nothing = "run_epoch submitted nothing"
        await self.skip(epoch, reason or f"{nothing}; {reason_for_skip(await self.metrics(epoch))}")

    def job_name(self, epoch: int | None, job: int = 1) -> str:
        """Return the idempotency key of a job, unique to target and attempt; of the warm-up without an epoch.

        The key of the first epoch of `run` is `run-epoch-1`, even after its folder was renamed.
        """
        attempt = self.log.state.failures[epoch]
        name = f"warm-up-{job}" if epoch is None else f"epoch-{epoch + 1}"
        whose = "" if self.target is None else f".{self.target}"
        which = "" if job == 1 or epoch is None else f"-job-{job}"
        retry = f"-retry-{attempt}" if attempt else ""
        return f"{self.runtime.run.first_name}-{name}{whose}{which}{retry}"

    async def sampled_from(self, epoch: int) -> ModelVersion | None:
        """Return the weights that the epoch's episodes are sampled from: those at the first call."""
        log = self.log
        if epoch not in log.state.sampled:
            await log.add(SampledFrom(epoch=epoch, version=self.model.version))
        return log.state.sampled[epoch]

    def require_not_stopped(self, epoch: int) -> None:
        """For a followed trainer: raise RunStopped if an alarm has ended the run before this epoch."""
        reason = self.reason_to_stop() if self.follows and not self.is_done(epoch) else None
        if reason is not None:
            self.stopped_because = reason
            raise RunStopped(f"the run has ended: {reason}")

    async def metrics(self, epoch: int) -> dict[str, Any]:
        """Return the figures of the epoch's episodes, with the facts that only the builder knows."""
        seen, run_id = self.collections.stats(epoch), self.history.run_id
        output, name = seen.output, self.config.reward_name
        items = dict(output.evaluation_results).get(name or "", EvalOutput()).eval_output_items
        groups, facts = self.built.get(epoch, ((), {}))
        counted = {
            "episodes": seen.episodes,
            **call_metrics(output),
            **seen.metrics(),
            "unscored": sum(not item.is_scored for item in items),
            "completion_tokens": seen.completion_tokens,
            "model_versions": {str(version): count for version, count in seen.model_versions.items()},
        }
        if items and "rewards" not in facts:
            meta = {"epoch": epoch, "run_id": run_id}
            rewards = [await self.builder.compute_reward(item, meta) for item in items if item.is_scored]
            counted["rewards"] = rewards
        given = {"scores": output.scores(), "bounds": output.bounds(), "reward": name}
        compares = data_kind(self.builder.method) != "imitation"
        metrics = collection_metrics(groups, {**counted, **facts, **given}, compares=compares)
        return self.with_name({**metrics, **self.trainer._curriculum_facts})

    async def adopt(self, epoch: int, ref: TrainingJobRef, status: TrainingJobStatus) -> EpochEntry:
        """Sample from the weights that a job made, and record its epoch.

        Raises TrainingError when the weights are not new.
        """
        submission = self.log.state.submission(ref.run_id)
        assert submission is not None, "the job was journalled when it was submitted"
        version = await self.model.adopt(ref, status)
        if version is not None and any(past.differs(version) for past in self.history.recoveries):
            self._progress.message(
                f"version {version.number} was made again, and is not to the bit what it was: a validation "
                "of it, and episodes sampled from it that are journalled, belong to the lost weights "
                "(`deterministic: true` makes them equal)",
                warning=True,
            )
        metrics = {
            **submission.metrics,
            "training": status.metrics,
            "training_seconds": time.monotonic() - self.started_jobs[ref.run_id][1],
            "model_version": None if version is None else version.number,
        }
        kept = {
            "sampled_from": await self.sampled_from(epoch),
            "curriculum_state": submission.curriculum_state,
        }
        self.log.add_soon(JobEnded(status=status))
        return await self._add_epoch(epoch, metrics, **kept)

    def report_training(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Report an epoch that was trained on, and write the metrics files."""
        self._progress.trained(epoch + 1, metrics)
        self.report(output_dir=output_dir)

    async def skip(self, epoch: int, reason: str) -> None:
        """Record that there was nothing to train on. Selected data was not submitted."""
        metrics = {**await self.metrics(epoch), **selection_metrics(())}
        await self._add_epoch(epoch, metrics, skipped=reason, sampled_from=await self.sampled_from(epoch))
        self._progress.skipped(epoch + 1, self.by_name(reason))
        self.report()

    async def rest(self, epoch: int, reason: str) -> None:
        """Record that the model was not due for training in the epoch."""
        await self._add_epoch(epoch, self.with_name({}), resting=reason)
        self.report()

    async def _add_epoch(self, epoch: int, metrics: dict[str, Any], **outcome: Any) -> EpochEntry:
        """Record an epoch. `outcome` has the other fields of its entry."""
        self.collections.targets.epoch_over(is_empty="skipped" in outcome and not self.history.trained_epochs)
        outcome = {"curriculum_state": finite(self.trainer.get_curriculum_state()), **outcome}
        unrecorded = EpochEntry(epoch=epoch + 1, metrics=metrics, version=self.model.version, **outcome)
        entry = await self.add(unrecorded)
        self.collections.forget(epoch)
        self.built.pop(epoch, None)
        return entry

    async def record_validation(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Record a validation of the current weights, after `epoch` epochs, unless there is one."""
        if self.history.validation(epoch) is not None:
            return
        if epoch == 0 and self.history.warm_up is not None:
            metrics = {**metrics, "is_warm": True}
        metrics, version = self.with_name(metrics), self.model.version
        entry = await self.add(ValidationEntry(epoch=epoch, metrics=metrics, version=version))
        self._progress.validated(epoch, entry.metrics)
        best = best_version(self.history)
        if version is not None and best is not None and version.number == best.number:
            await self.adapter.keep(version)
        self.report()

    @property
    def history(self) -> History:
        """The epochs and validations so far."""
        return self.log.state.history

    def is_done(self, epoch: int) -> bool:
        """Return whether the epoch (from 0) is recorded."""
        return self.history.epoch(epoch + 1) is not None

    def add_metrics(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Take metrics of an epoch (from 0), replacing others with their names."""
        metrics = json_facts(metrics)
        entry = self.history.epoch(epoch + 1)
        if entry is None:
            self._logged[epoch] = {**self._logged.get(epoch, {}), **metrics}
        elif any(entry.metrics.get(key) != value for key, value in metrics.items()):
            self.log.add_soon(MetricsAdded(epoch=entry.epoch, metrics=metrics))

    async def add(self, entry: E) -> E:
        """Record an epoch or a validation with the alarms that hold, instead of an earlier record of it."""
        metrics = json_facts(entry.metrics)
        if entry.kind == "epoch":
            metrics |= self._logged.get(entry.epoch - 1, {})
        entry = entry.model_copy(update={"metrics": metrics})
        trained_on = [each for each in self.history.epochs if each.resting is None]
        known: Sequence[Entry] = trained_on if entry.kind == "epoch" else self.history.validations
        before = [each for each in known if each.epoch < entry.epoch]
        has_rung = {event.key for each in known if each.epoch == entry.epoch for event in each.alarms}
        alarms = alarm_events(self.alarms, entry, before)
        new = [event for event in alarms if event.is_new and event.key not in has_rung]
        entry = entry.model_copy(update={"alarms": alarms})
        await self.log.add(entry)
        if entry.kind == "epoch":
            # Some may have arrived meanwhile.
            self.add_metrics(entry.epoch - 1, self._logged.pop(entry.epoch - 1, {}))
        self._ringing += [(entry, event) for event in new]
        return entry

    def reason_to_stop(self) -> str | None:
        """Return why an alarm ends the run after its last epoch, unless the alarm's action has changed."""
        last = max((entry.epoch for entry in self.history.epochs), default=0)
        for entry in self.history.entries:
            for event in entry.alarms if entry.epoch == last else ():
                alarm = self.alarms.get(event.alarm)
                if event.action == "stop" and alarm is not None and alarm.action == "stop":
                    return self.by_name(f"{entry}: {event.text}")
        return None

    def report(self, *, output_dir: str | None = None, final: bool = False) -> None:
        """Report alarms that rang since the last report, and write the metrics files.

        At the end of a run, warn if held-out examples were not used.
        """
        runtime, ringing, self._ringing = self.runtime, self._ringing, []
        for entry, event in ringing:
            facts = event.model_dump(mode="json", exclude={"is_new"})
            facts["text"] = self.by_name(f"{entry}: {event.text}")
            if event.episode is not None:
                facts["text"] += f". One of them: {show_command(runtime.run.path, event.episode)}"
            facts |= {"measured": entry.kind, "epoch": entry.epoch}
            runtime.progress.alarm(self.with_name(facts))
        if final and runtime.validation_examples and not self.history.validations:
            runtime.progress.message(
                f"the trainer never ran the validation: {len(runtime.validation_examples)} held-out examples "
                "were not used. Await `run_validation_evaluation(epoch, run_id)` in its `run`",
                warning=True,
            )
        if runtime.report is not None:
            runtime.report(self.history, self.folder(output_dir), final)

    def folder(self, output_dir: str | None = None) -> Path:
        """Return the folder of the files: the run folder or `output_dir`, or a target's own part of it."""
        folder = self.runtime.run.path if output_dir is None else Path(output_dir)
        if self.target is not None:
            folder = folder / "targets" / self.target
            private_folder(folder)
        return folder

    def with_name(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics with the target's name under `target`, if there are several targets."""
        return metrics if self.target is None else {"target": self.target, **metrics}

    def by_name(self, text: str) -> str:
        """Return the text with the target's name before it, if there are several targets."""
        return text if self.target is None else f"{self.target}: {text}"


def require_trained(several: Sequence[Bookkeeper]) -> list[TrainingJobStatus]:
    """Return the statuses of all completed jobs, by epoch. Raises TrainingError if there were none."""
    histories = [books.history for books in several]
    epochs: list[EpochEntry] = [entry for history in histories for entry in history.epochs]
    statuses: list[tuple[int, TrainingJobStatus]] = []
    for state in (books.log.state for books in several):
        for (epoch, _), submission in sorted(state.submissions.items()):
            status = state.ended.get(submission.ref.run_id)
            if status is not None and status.status is TrainingStatusEnum.COMPLETED:
                statuses.append((epoch, status))
    if not statuses:
        reasons = sorted({entry.skipped for entry in epochs if entry.skipped} or {"no job was due"})
        most = max((len(history.epochs) for history in histories), default=0)
        causes = "".join(f"\n  {cause} (first in {cause.episode})" for cause in causes_in(epochs))
        raise TrainingError(
            f"the run trained on nothing in {most} epochs. {' | '.join(reasons)}; see {PAGE}{causes}"
        )
    return [status for _, status in sorted(statuses, key=lambda pair: pair[0])]


async def end_run(several: Sequence[Bookkeeper], num_epochs: int, run: RunFolder, progress: Progress) -> None:
    """Record that a run is over, and report its end. There are books for each target."""
    for books in several:
        books.report(final=True)
    for books in several:
        if books.log.state.end is None:
            await books.log.add(RunEnded())
    by_target = {books.target: books.history for books in several}
    progress.finished(summary_in(by_target, run.name, num_epochs).as_json())


@asynccontextmanager
async def record_failure(log: ModelLog, failure: Record) -> AsyncIterator[None]:
    """Record that a job fails in the block, so that a resumed run makes another, unless it still runs."""
    try:
        yield
    except JobStillRunning:
        raise
    except TrainingError:
        await log.add(failure)
        raise


def describe(several: Sequence[Bookkeeper]) -> dict[str, Any]:
    """Return the facts of the run that are shown when it starts, from the books of each trained model."""
    first, runtime = several[0], several[0].runtime
    parts = {
        "target_model": [books.runtime.target_model for books in several],
        "trajectory_builder": [books.builder.trajectory_builder_config.type_name for books in several],
        "trainer_adapter": [books.adapter.adapter_config.type_name for books in several],
    }
    return {
        "folder": str(runtime.run.path),
        "examples": len(runtime.examples),
        "validation_examples": len(runtime.validation_examples),
        **{key: ", ".join(dict.fromkeys(names)) for key, names in parts.items()},
        "epochs_done": len(first.history.epochs),
    }
