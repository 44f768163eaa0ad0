"""The bookkeeper: checks and records the work of a trainer and its parts, also of custom ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import FinetuneConfig
from etude.core.conversion import TrajectoryCollection
from etude.core.data_model import finite
from etude.core.episode import EpisodeRecord
from etude.core.errors import EtudeError, RunStopped, TrainingError
from etude.core.evaluation import EvalOutput
from etude.core.history import EpochEntry, ValidationEntry, WarmUpEntry
from etude.core.interfaces import innermost
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.json_text import json_facts
from etude.core.records import JobDropped, SampledFrom, Submission
from etude.groups.agents import ModelSettings
from etude.groups.model_jobs import ModelJobs
from etude.groups.opponents import OpponentPool
from etude.loop.metrics import call_metrics, collection_metrics, reason_for_skip, selection_metrics
from etude.loop.record import TrainingRecord
from etude.loop.training_data import Provenance, TargetWatch
from etude.rollout.collections import Collections, collecting_for, current_number
from etude.runtime import Runtime
from etude.store.figures import best_version, last_version, versions_made


class Bookkeeper:
    """Hands out fresh episodes, checks submitted data, and makes and records each job once.

    A trainer's builder collects through `collections`, and the adapter that it gets leads here. So the
    guarantees hold for all trainers. `EpochTrainer` tells what became of an epoch. For any other trainer, the
    bookkeeper `follows` the jobs that it submits and asks after. It adopts a job's weights when the trainer
    learns that the job is completed. Such a run is resumed by doing the same again. Episodes come from the
    journal, a submitted job is not submitted again, and an ended job ends at once in the same way.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: FinetuneConfig,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
        curriculum_state: Callable[[], dict[str, Any]],
        facts: Callable[[], dict[str, Any]],
        *,
        follows: bool,
    ) -> None:
        """`facts` returns the trainer's metrics of an epoch. `runtime` says which target this model is."""
        self.runtime = runtime
        self.config = config
        self.builder = builder
        self.adapter = adapter
        self.follows = follows
        self.record = TrainingRecord(runtime, config)
        warn = partial(runtime.progress.message, warning=True)
        model, frozen = runtime.target_model, runtime.target_config.frozen
        self.model = ModelJobs(
            model,
            adapter,
            runtime.engines[model],
            self.record.log,
            settings=ModelSettings(model, frozen, config.fine_tune_from_scratch),
            warn=warn,
            watchdog=runtime.watchdog,
            ledger=runtime.ledger,
        )
        self._progress = runtime.progress
        self._provenance = Provenance(model)
        self._targeted = TargetWatch(config.target_functions, model, warn, runtime.target)
        self.collections = Collections(
            runtime.evaluation, model, lambda: self.epoch, self._saw, self.require_not_stopped
        )
        self._curriculum_state = curriculum_state
        self._facts = facts
        pools = [each for each in map(innermost, runtime.engines.values()) if isinstance(each, OpponentPool)]
        self.opponents = [pool for pool in pools if pool.config.of == model]
        for pool in self.opponents:
            pool.follow(self.record.log)
        self.built: dict[int, tuple[TrajectoryCollection, dict[str, Any]]] = {}
        """For each epoch: the builder's finished collection, and its facts about that."""
        self.jobs: dict[int, int] = {}
        """How many jobs this process has submitted for an epoch, or found submitted."""
        self.begun: dict[str, tuple[int, float, TrainingJobRef]] = {}
        """These jobs by name, each with its epoch, and when the trainer submitted it."""
        self.over: set[int] = set()
        """The epochs that a followed trainer has finished."""
        self.reasons: dict[int, str] = {}
        """Why nothing was submitted for an epoch."""
        self.failure: EtudeError | None = None
        """Why data was refused or weights were not adopted, even if the trainer caught the error."""
        self.stopped_because: str | None = None
        """The alarm that has ended the run, once the trainer knows."""
        self._visited: set[int] = set()
        self._latest = 0

    def _saw(self, epoch: int, episode: EpisodeRecord) -> None:
        self._provenance.saw(epoch, episode)
        self._targeted.saw(episode)

    @property
    def epoch(self) -> int:
        """The epoch that is being worked on, from 0.

        Outside of `run_epoch`, it is the latest epoch, or the one after it if its job was submitted.
        """
        inside = current_number("train")
        return self._latest + (self._latest in self.jobs) if inside is None else inside

    @contextmanager
    def working_on(self, epoch: int) -> Iterator[None]:
        """Collect for an epoch and submit its job in the block."""
        self._latest = epoch
        with collecting_for("train", epoch):
            yield

    def submitted(self, epoch: int, job: int, ref: TrainingJobRef) -> None:
        """Note the `job`-th job of an epoch, which was submitted now or is known from before."""
        self._latest, self.jobs[epoch] = epoch, job
        self.begun.setdefault(ref.run_id, (epoch, time.monotonic(), ref))
        if self.follows and ref.run_id not in self.record.log.state.ended:
            self._progress.phase("training")

    async def take_up(self) -> None:
        """Continue where the run was left. Raises TrainingError when the backend is not healthy."""
        if not await self.adapter.is_healthy():
            kind = self.adapter.adapter_config.type_name or type(self.adapter).__name__
            why = f" ({self.adapter.unhealthy_because})" if self.adapter.unhealthy_because else ""
            raise TrainingError(f"the training backend '{kind}' is not healthy; nothing was sampled yet{why}")
        await self.model.take_up(last_version(self.record.history))
        if (start := self.record.history.start) is not None:
            await self.adapter.begin_from(start)
        # The last job is submitted again if it failed.
        known = self.record.log.state
        for epoch, job in sorted(known.submissions)[-1:]:
            status = known.ended.get(known.submissions[epoch, job].ref.run_id)
            if status is not None and status.status is not TrainingStatusEnum.COMPLETED:
                await self.record.log.add(JobDropped(epoch=epoch, job=job))

    async def begin(self, epoch: int) -> int:
        """Begin `run_epoch` and return its epoch's number, a new one if the trainer repeats a number.

        Raises RunStopped if an alarm has ended the run.
        """
        if epoch in self._visited:
            epoch = max(self._visited) + 1
        self.require_not_stopped(epoch)
        self._visited.add(epoch)
        if not self.record.is_done(epoch):
            self._progress.epoch_started(epoch + 1, self.config.num_epochs)
            self._progress.phase("collecting")
        return epoch

    async def end(self, epoch: int, outcome: object) -> None:
        """End `run_epoch`. If it made no job, record that there was nothing to train on."""
        if epoch in self.jobs:
            return
        self.over.add(epoch)
        if self.record.is_done(epoch):
            return
        reason = outcome.reason if isinstance(outcome, Skipped) else self.reasons.get(epoch)
        nothing = "run_epoch submitted nothing"
        await self.skip(epoch, reason or f"{nothing}; {reason_for_skip(await self.metrics(epoch))}")

    def job_name(self, epoch: int, job: int = 1) -> str:
        """Return the idempotency key of the `job`-th job of an epoch (from 0), unique to target and attempt.

        The key of the first epoch of `run` is `run-epoch-1`, even after its folder was renamed.
        """
        record, attempt = self.record, self.record.log.state.failures[epoch]
        whose = "" if record.target is None else f".{record.target}"
        which = "" if job == 1 else f"-job-{job}"
        retry = f"-retry-{attempt}" if attempt else ""
        return f"{self.runtime.run.first_name}-epoch-{epoch + 1}{whose}{which}{retry}"

    def check(self, collection: TrajectoryCollection, epoch: int) -> None:
        """Raise TrainingError unless the epoch's data comes from the weights that it was collected from."""
        self._provenance.check(
            collection,
            self.collections.of(epoch).model_versions,
            self.model.version,
            versions_made(self.record.history),
            int(self.config.collect_ahead),
            epoch,
        )

    async def record_submission(
        self, epoch: int, job: int, ref: TrainingJobRef, collection: TrajectoryCollection
    ) -> None:
        """Record a job that was just submitted."""
        submission = Submission(
            ref=ref,
            epoch=epoch,
            job=job,
            metrics=json_facts({**await self.metrics(epoch), **selection_metrics(collection)}),
            curriculum_state=finite(self._curriculum_state()),
        )
        await self.sampled_from(epoch)  # Recorded now, before its job's weights are adopted.
        await self.record.log.add(submission)

    async def sampled_from(self, epoch: int) -> ModelVersion | None:
        """Return the weights that the epoch's episodes are sampled from: those at the first call."""
        log = self.record.log
        if epoch not in log.state.sampled:
            await log.add(SampledFrom(epoch=epoch, version=self.model.version))
        return log.state.sampled[epoch]

    def require_not_stopped(self, epoch: int) -> None:
        """For a followed trainer: raise RunStopped if an alarm has ended the run before this epoch."""
        reason = self.record.reason_to_stop() if self.follows and not self.record.is_done(epoch) else None
        if reason is not None:
            self.stopped_because = reason
            raise RunStopped(f"the run has ended: {reason}")

    async def metrics(self, epoch: int) -> dict[str, Any]:
        """Return the figures of the episodes that were handed out for the epoch.

        The builder adds facts that only it knows: which groups it left out, and how it shaped rewards.
        """
        seen, run_id = self.collections.of(epoch), self.record.history.run_id
        output, reward = seen.output, self.config.reward_function
        name = None if reward is None else reward.name
        items = dict(output.evaluation_results).get(name or "", EvalOutput()).eval_output_items
        collection, facts = self.built.get(epoch, (TrajectoryCollection(run_id=run_id), {}))
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
        metrics = collection_metrics(collection, {**counted, **facts, **given})
        return self.record.with_name({**metrics, **self._facts()})

    async def adopt(self, epoch: int, ref: TrainingJobRef, status: TrainingJobStatus) -> EpochEntry:
        """Sample from the weights that a job made, and record its epoch.

        Raises TrainingError when the weights are not new.
        """
        submission = self.record.log.state.submission(ref.run_id)
        assert submission is not None, "the job was journalled when it was submitted"
        version = await self.model.adopt(ref, status)
        if version is not None and any(past.differs(version) for past in self.record.history.recoveries):
            self._progress.message(
                f"version {version.number} was made again, and is not to the bit what it was: a validation "
                "of it, and episodes sampled from it that are journalled, are those of the weights that were "
                "lost (`deterministic: true` makes them equal)",
                warning=True,
            )
        metrics = {
            **submission.metrics,
            "training": status.metrics,
            "training_seconds": time.monotonic() - self.begun[ref.run_id][1],
            "model_version": None if version is None else version.number,
        }
        kept = {
            "sampled_from": await self.sampled_from(epoch),
            "curriculum_state": submission.curriculum_state,
        }
        return await self._add_epoch(epoch, metrics, status=status, **kept)

    def trained(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Report an epoch that was trained on, and write the metrics files."""
        self._progress.trained(epoch + 1, metrics)
        self.record.report(output_dir=output_dir)

    async def skip(self, epoch: int, reason: str) -> None:
        """Record that there was nothing to train on. Selected data was not submitted."""
        nothing = selection_metrics(TrajectoryCollection(run_id=self.record.history.run_id))
        metrics = {**await self.metrics(epoch), **nothing}
        await self._add_epoch(epoch, metrics, skipped=reason, sampled_from=await self.sampled_from(epoch))
        self._progress.skipped(epoch + 1, self.record.by_name(reason))
        self.record.report()

    async def rest(self, epoch: int, reason: str) -> None:
        """Record that the model was not due for training in the epoch."""
        await self._add_epoch(epoch, self.record.with_name({}), resting=reason)
        self.record.report()

    async def _add_epoch(self, epoch: int, metrics: dict[str, Any], **outcome: Any) -> EpochEntry:
        """Record an epoch. `outcome` has the other fields of its entry."""
        self._targeted.epoch_over(is_empty="skipped" in outcome and not self.record.history.trained)
        outcome = {"curriculum_state": finite(self._curriculum_state()), **outcome}
        made = EpochEntry(epoch=epoch + 1, metrics=metrics, version=self.model.version, **outcome)
        entry = await self.record.add(made)
        self.collections.forget(epoch)
        self.built.pop(epoch, None)
        return entry

    async def record_warm_up(self, entry: WarmUpEntry) -> None:
        """Record that the warm-up is over. Training begins with its weights."""
        if entry.version is not None:
            await self.adapter.begin_from(entry.version)
        await self.record.log.add(entry)

    async def validated(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Record a validation of the current weights, after `epoch` epochs, unless there is one."""
        if self.record.history.validation(epoch) is not None:
            return
        if epoch == 0 and self.record.history.warm_up is not None:
            metrics = {**metrics, "is_warm": True}
        metrics, version = self.record.with_name(metrics), self.model.version
        entry = await self.record.add(ValidationEntry(epoch=epoch, metrics=metrics, version=version))
        self._progress.validated(epoch, entry.metrics)
        best = best_version(self.record.history)
        if version is not None and best is not None and version.number == best.number:
            await self.adapter.keep(version)
        self.record.report()


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
        "epochs_done": len(first.record.history.epochs),
    }
