"""The bookkeeper: what all parts of one trainer go through, whoever wrote them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import FinetuneConfig
from etude.core.around import entered
from etude.core.data_model import finite
from etude.core.episode import EpisodeRecord, cut_off_share
from etude.core.errors import TrainingError
from etude.core.evaluation import EvalOutputItem, EvaluationRunOutput
from etude.core.history import EpochEntry, History, WarmUpEntry
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingJobStatus
from etude.core.trajectory import TrajectoryCollection
from etude.groups.line import LineRules, ModelLine
from etude.groups.opponents import Game, OpponentPool, games_of
from etude.inference.routes import HasAddresses
from etude.jobs.content import JobNameTakenError
from etude.loop.checks import Provenance, TargetWatch
from etude.loop.metrics import collection_metrics, selection_metrics
from etude.loop.record import Record
from etude.rewards.collections import Collections, within, worked_on
from etude.runtime import Runtime
from etude.store.facts import SUMMARY
from etude.store.figures import last_version, versions_made
from etude.store.log import Submission
from etude.store.summary import causes_in, shown_cause, summary_of


class Bookkeeper:
    """Episodes are handed out fresh, data is checked where it is submitted, each job is made and noted once.

    A trainer's builder collects through `collections`, and its adapter's `submit` leads here. So what is
    promised of a run holds for every combination of builders, trainers and adapters. `EpochTrainer` says
    what became of each epoch (`adopt`, `skip`, `rest`); of other trainers a `Follower` finds it out.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: FinetuneConfig,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
        curriculum_state: Callable[[], dict[str, Any]],
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        """`facts` are what the trainer knows of the epoch's data, as metrics.

        The runtime says which target the model is, of several that are trained in one run.
        """
        self.runtime = runtime
        self.config = config
        self.builder = builder
        self.adapter = adapter
        self.record = Record(runtime)
        self.line = ModelLine(
            runtime.target or runtime.target_model,
            runtime.target_model,
            adapter,
            runtime.engines[runtime.target_model],
            runtime.run.journal,
            rules=LineRules(frozen=runtime.target_config.frozen, from_scratch=config.fine_tune_from_scratch),
            warn=lambda text: runtime.progress.message(text, warning=True),
        )
        self.collections = Collections(
            runtime.evaluation, runtime.target_model, lambda: self.epoch, self._saw
        )
        self._progress = runtime.progress
        self._provenance = Provenance(runtime.target_model)
        self._targeted = TargetWatch(config.target_functions, runtime.target_model, runtime.progress)
        self._curriculum_state = curriculum_state
        self._facts = facts
        self.opponents = [
            engine
            for engine in runtime.engines.values()
            if isinstance(engine, OpponentPool) and engine.config.of == runtime.target_model
        ]
        self._games: defaultdict[tuple[int, str], list[Game]] = defaultdict(list)
        """By epoch and entry of `llms`: whom the trained model has met."""
        self._built: dict[int, tuple[TrajectoryCollection, dict[str, Any]]] = {}
        self._jobs: dict[int, int] = {}
        self._entered: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is being worked on, from 0.

        Outside of `run_epoch` it is that of the last one, or the one after it when its job was submitted;
        where the trainer has none, the number of the epochs that have a job.
        """
        inside = worked_on("train")
        if inside is not None:
            return inside
        if self._entered is None:
            return len(self._jobs)
        return self._entered + 1 if self._entered in self._jobs else self._entered

    @contextmanager
    def working_on(self, epoch: int) -> Iterator[None]:
        """Collect for an epoch and submit its job here."""
        self._entered = epoch
        with within("train", epoch):
            yield

    async def take_up(self) -> None:
        """Go on where the run was left. Raises TrainingError when the backend is not healthy."""
        if not await self.adapter.is_healthy():
            kind = self.adapter.adapter_config.type_name or type(self.adapter).__name__
            raise TrainingError(f"the training backend '{kind}' is not healthy; nothing was sampled yet")
        await self.line.take_up(last_version(self.record.history))
        if (start := self.record.history.start) is not None:
            await self.adapter.begin_from(start)
        await self.record.log.retry_last_failure()

    def describe(self) -> dict[str, Any]:
        """The facts of the run that are shown at its beginning."""
        runtime = self.runtime
        return {
            "folder": str(runtime.run.path),
            "examples": len(runtime.examples),
            "validation_examples": len(runtime.validation_examples),
            "target_model": runtime.target_model,
            "trajectory_builder": self.builder.trajectory_builder_config.type_name,
            "trainer_adapter": self.adapter.adapter_config.type_name,
            "epochs_done": len(self.record.history.epochs),
        }

    def built(self, collection: TrajectoryCollection, facts: dict[str, Any]) -> None:
        """Take what the builder says of a collection that it has finished."""
        self._built[self.epoch] = (collection, facts)

    async def submit(self, collection: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start the job of the epoch, or give back the one that it has.

        The job is called by the run, the epoch and how often it has failed, whatever the collection was
        called. Raises TrainingError when the data are not of the weights that they are said to come from.
        """
        epoch, log = self.epoch, self.record.log
        job = self._jobs.get(epoch, 0) + 1
        known = log.submission(epoch, job)
        if known is not None and (self.record.ended(known.ref) or await self.line.is_known(known.ref)):
            self._jobs[epoch] = job
            return known.ref
        self.check(collection, epoch)
        try:
            ref = await self._start(collection, epoch, job)
        except JobNameTakenError:
            # A process that was killed before it noted this job had made it of other data: of episodes that
            # have been tried again since.
            await log.forget_submission(epoch, job)
            ref = await self._start(collection, epoch, job)
        if isinstance(ref, TrainingJobRef):
            submission = Submission(
                ref=ref,
                metrics=finite({**await self.metrics(epoch), **selection_metrics(collection)}),
                curriculum_state=finite(self._curriculum_state()),
                sampled_from=await self.sampled_from(epoch),
            )
            await log.add_submission(epoch, submission, job)
            self._jobs[epoch] = job
        return ref

    async def _start(
        self, collection: TrajectoryCollection, epoch: int, job: int
    ) -> TrainingJobRef | Skipped:
        with entered(self.adapter, "submit"):
            return await self.line.submit(collection.model_copy(update={"run_id": self.job_name(epoch, job)}))

    def job_name(self, epoch: int, job: int = 1) -> str:
        """The idempotency key of the `job`-th job of an epoch (from 0): another for each target and attempt.

        That of the first epoch of `run` is `run-epoch-1`.
        """
        record, attempt = self.record, self.record.log.attempt(epoch)
        whose = "" if record.target is None else f".{record.target}"
        which = "" if job == 1 else f"-job-{job}"
        retry = f"-retry-{attempt}" if attempt else ""
        return f"{record.history.run_id}-epoch-{epoch + 1}{whose}{which}{retry}"

    def check(self, collection: TrajectoryCollection, epoch: int) -> None:
        """Raise TrainingError unless the epoch's data are of the weights that it was collected from."""
        self._provenance.check(
            collection,
            self.collections.of(epoch).model_versions,
            self.line.version,
            versions_made(self.record.history),
            int(self.config.collect_ahead),
            epoch,
        )

    async def sampled_from(self, epoch: int) -> ModelVersion | None:
        """The weights that the epoch's episodes are sampled from: those of when it is asked first."""
        return await self.record.log.sampled_from(epoch, self.line.version)

    async def followed(
        self, ref: TrainingJobRef, ask: Callable[[], Awaitable[TrainingJobStatus]]
    ) -> TrainingJobStatus:
        """How a job stands, as the backend says."""
        return await ask()

    async def metrics(self, epoch: int) -> dict[str, Any]:
        """The figures of what was collected for the epoch: of the episodes that were handed out.

        Of itself the builder says what only it knows: what it left out, and how it shaped rewards.
        """
        seen, reward = self.collections.of(epoch), self.config.reward_function
        output = seen.output
        scored = {name: result.eval_output_items for name, result in output.evaluation_results}
        items = scored.get(reward.name, []) if reward is not None else []
        run_id = self.record.history.run_id
        collection, facts = self._built.get(epoch, (TrajectoryCollection(run_id=run_id), {}))
        counted = {
            "episodes": seen.episodes,
            "failures": output.failures,
            "failure_causes": [cause.model_dump() for cause in output.causes],
            "calls": output.calls,
            **self._addresses(output),
            "cut_off_share": cut_off_share(output.calls),
            "unscored": sum(not item.is_scored for item in items),
            "completion_tokens": seen.completion_tokens,
            "model_versions": {str(version): count for version, count in seen.model_versions.items()},
        }
        if items and "rewards" not in facts:
            counted["rewards"] = await rewards_of(self.builder, items, {"epoch": epoch, "run_id": run_id})
        metrics = collection_metrics(collection, {**counted, **facts, "scores": output.scores()})
        met = {pool.name: self._met(epoch, pool) for pool in self.opponents}
        return self.record.with_name({**metrics, **({"opponents": met} if met else {}), **self._facts()})

    def _addresses(self, output: EvaluationRunOutput) -> dict[str, Any]:
        """The attempts at calls by address, and how each address is now; nothing where models have one."""
        engine = self.line.engine
        states = engine.address_states() if isinstance(engine, HasAddresses) else {}
        rows: dict[str, dict[str, Any]] = {url: {"answers": 0, "failed": 0} for url in states}
        rows |= {url: dict(counts) for url, counts in output.addresses.items()}
        for url, state in states.items():
            rows[url]["state"] = state
        return {"addresses": rows} if rows else {}

    def _met(self, epoch: int, pool: OpponentPool) -> dict[str, Any]:
        reward = self.config.reward_function
        past = self.record.history.until(epoch)
        return pool.figures(self._games[epoch, pool.name], None if reward is None else reward.name, past)

    def submission_of(self, name: str) -> Submission | None:
        """The record of a job, by its name; None without one."""
        submissions = (submission for _, _, submission in self.record.log.submissions())
        return next((each for each in submissions if each.ref.run_id == name), None)

    async def adopt(self, epoch: int, ref: TrainingJobRef, status: TrainingJobStatus, since: float) -> None:
        """Have the model sample from the weights that a job made, and record its epoch.

        `since` is when the job began, by `time.monotonic`. Raises TrainingError when the weights are not new.
        """
        submission = self.submission_of(ref.run_id)
        version = await self.line.adopt(ref, status)
        known = await self.metrics(epoch) if submission is None else submission.metrics
        metrics = {
            **known,
            "training": (status.metadata or {}).get("metrics", {}),
            "training_seconds": time.monotonic() - since,
            "model_version": None if version is None else version.number,
        }
        await self._add_epoch(
            epoch,
            metrics,
            status=status,
            sampled_from=None if submission is None else submission.sampled_from,
            curriculum_state=None if submission is None else submission.curriculum_state,
        )

    def trained(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Tell of an epoch that was trained on, and write the metrics files."""
        self._progress.trained(epoch + 1, metrics)
        self.record.warn(self.record.history.epochs)
        self.record.report(output_dir=output_dir)

    async def skip(self, epoch: int, reason: str) -> None:
        """Record that there was nothing to train on."""
        await self._add_epoch(
            epoch,
            await self.metrics(epoch),
            skipped=reason,
            sampled_from=await self.sampled_from(epoch),
            curriculum_state=finite(self._curriculum_state()),
        )
        self._progress.skipped(epoch + 1, self.record.by_name(reason))
        self.record.warn(self.record.history.epochs)
        self.record.report()

    async def rest(self, epoch: int, reason: str) -> None:
        """Record that the model was not meant to be trained in the epoch."""
        await self._add_epoch(
            epoch,
            self.record.with_name({}),
            resting=reason,
            curriculum_state=finite(self._curriculum_state()),
        )
        self.record.report()

    async def _add_epoch(self, epoch: int, metrics: dict[str, Any], **outcome: Any) -> None:
        backup = self.runtime.backup
        if backup is not None:
            metrics = {**metrics, "storage": backup.figures()}
        await self.record.add_epoch(epoch, metrics, version=self.line.version, **outcome)
        if backup is not None:
            await backup.epoch_over()
        self.collections.forget(epoch)
        for pool in self.opponents:
            self._games.pop((epoch, pool.name), None)
        self._built.pop(epoch, None)

    async def warmed_up(self, entry: WarmUpEntry) -> None:
        """Record that the warm-up is over: its weights are what training begins with."""
        if entry.version is not None:
            await self.line.log.add_base(entry.version)
            await self.adapter.begin_from(entry.version)
        await self.record.add_warm_up(entry)

    async def validated(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Record a validation of the weights as they are, after `epoch` epochs, unless there is one."""
        if self.record.is_validated(epoch):
            return
        metrics = self.record.with_name(metrics)
        entry = await self.record.add_validation(epoch, metrics, version=self.line.version)
        self._progress.validated(epoch, entry.metrics)
        self.record.warn(self.record.history.validations)
        self.record.report()

    def finish(self) -> None:
        """Record the end of the run."""
        summary = summary_of(self.record.history)
        self.runtime.run.write_json(SUMMARY, summary)
        self.record.report(final=True)
        self._progress.finished(summary)

    def _saw(self, epoch: int, episode: EpisodeRecord) -> None:
        for pool in self.opponents:
            self._games[epoch, pool.name] += games_of(episode, self.runtime.target_model, pool.name)
        self._provenance.saw(episode)
        self._targeted.saw(episode)


async def rewards_of(
    builder: TrajectoryBuilder, items: list[EvalOutputItem], meta: dict[str, Any]
) -> list[float]:
    """The builder's rewards of the items that have a score."""
    return [await builder.compute_reward(item, meta) for item in items if item.is_scored]


def require_trained(histories: Sequence[History]) -> list[TrainingJobStatus]:
    """The statuses of all jobs, by epoch. Raises TrainingError when there were none."""
    epochs: list[EpochEntry] = [entry for history in histories for entry in history.epochs]
    statuses = [entry.status for entry in sorted(epochs, key=lambda entry: entry.epoch) if entry.status]
    if not statuses:
        reasons = sorted({entry.skipped for entry in epochs if entry.skipped is not None})
        most = max((len(history.epochs) for history in histories), default=0)
        shown = (f"\n  {shown_cause(cause)} (first in {cause['episode']})" for cause in causes_in(epochs))
        causes = "".join(shown)
        raise TrainingError(f"the run trained on nothing in {most} epochs. {' | '.join(reasons)}{causes}")
    return statuses
