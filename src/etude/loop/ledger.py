"""The ledger: what all parts of one trainer go through, whoever wrote them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.finetuning import FinetuneConfig
from etude.core.around import entered
from etude.core.episode import EpisodeRecord
from etude.core.errors import TrainingError
from etude.core.evaluation import EvalOutputItem
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus
from etude.core.numbers import finite
from etude.core.skipped import Skipped
from etude.core.trajectory import TrajectoryCollection
from etude.groups.line import LineRules, ModelLine
from etude.jobs.content import JobNameTakenError
from etude.loop.checks import Provenance, TargetWatch
from etude.loop.metrics import collection_metrics, selection_metrics
from etude.loop.record import Record
from etude.rewards.collections import Collections, within, worked_on
from etude.runtime import Runtime
from etude.store.figures import last_version, versions_made
from etude.store.log import Submission


class Ledger:
    """Episodes are handed out fresh, data is checked where it is submitted, and each job is made once.

    A trainer's builder collects through `collections`, and its adapter's `submit` leads here. So what is
    promised of a run holds for every combination of builders, trainers and adapters.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: FinetuneConfig,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
    ) -> None:
        """The runtime says which target the model is, of several that are trained in one run."""
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
        self._provenance = Provenance(runtime.target_model)
        self._targeted = TargetWatch(config.target_functions, runtime.target_model, runtime.progress)
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

    async def submit(
        self,
        collection: TrajectoryCollection,
        *,
        metrics: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
        curriculum_state: dict[str, Any] | None = None,
    ) -> TrainingJobRef | Skipped:
        """Start the job of the epoch, or give back the one that it has.

        `metrics` are the epoch's where they are not those that the ledger knows, and `facts` are more of
        them. The job is called by the run, the epoch and how often it has failed, whatever the collection was
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
            ref = await self._submit(collection, epoch, job)
        except JobNameTakenError:
            # A process that was killed before it noted this job had made it of other data: of episodes that
            # have been tried again since.
            await log.forget_submission(epoch, job)
            ref = await self._submit(collection, epoch, job)
        if isinstance(ref, TrainingJobRef):
            if metrics is None:
                metrics = {**await self.metrics(epoch), **selection_metrics(collection)}
            submission = Submission(
                ref=ref,
                metrics=finite({**metrics, **(facts or {})}),
                curriculum_state=finite(curriculum_state),
                sampled_from=await self.sampled_from(epoch),
            )
            await log.add_submission(epoch, submission, job)
            self._jobs[epoch] = job
        return ref

    async def _submit(
        self, collection: TrajectoryCollection, epoch: int, job: int
    ) -> TrainingJobRef | Skipped:
        attempt = self.record.log.attempt(epoch)
        name = job_name(self.record.history.run_id, epoch, attempt, self.record.target, job)
        with entered(self.adapter, "submit"):
            return await self.line.submit(collection.model_copy(update={"run_id": name}))

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

    def submission_of(self, epoch: int, name: str) -> Submission | None:
        """The record of a job of the epoch, by its name; None without one."""
        for job in count(1):
            submission = self.record.log.submission(epoch, job)
            if submission is None or submission.ref.run_id == name:
                return submission
        raise AssertionError("the jobs of an epoch come to an end")

    async def followed(
        self, ref: TrainingJobRef, ask: Callable[[], Awaitable[TrainingJobStatus]]
    ) -> TrainingJobStatus:
        """How a job stands, as the backend says."""
        return await ask()

    async def metrics(self, epoch: int) -> dict[str, Any]:
        """The figures of what was collected for the epoch: of the episodes that were handed out.

        Of itself the builder says what only it knows: what it left out, and how it shaped rewards.
        """
        seen = self.collections.of(epoch)
        output, reward = seen.output, self.config.reward_function
        scored = {name: result.eval_output_items for name, result in output.evaluation_results}
        items = scored.get(reward.name, []) if reward is not None else []
        run_id = self.record.history.run_id
        collection, facts = self._built.get(epoch, (TrajectoryCollection(run_id=run_id), {}))
        counted = {
            "episodes": seen.episodes,
            "failures": output.failures,
            "failure_causes": [cause.model_dump() for cause in output.causes],
            "calls": output.calls,
            "unscored": sum(not item.is_scored for item in items),
            "completion_tokens": seen.completion_tokens,
            "model_versions": {str(version): count for version, count in seen.model_versions.items()},
        }
        if items and "rewards" not in facts:
            counted["rewards"] = await rewards_of(self.builder, items, {"epoch": epoch, "run_id": run_id})
        return self.record.with_name(
            collection_metrics(collection, {**counted, **facts, "scores": output.scores()})
        )

    def finished(self, epoch: int) -> None:
        """Let go of what is only needed while an epoch is worked on."""
        self.collections.forget(epoch)
        self._built.pop(epoch, None)

    def _saw(self, epoch: int, episode: EpisodeRecord) -> None:
        self._provenance.saw(episode)
        self._targeted.saw(episode)


async def rewards_of(
    builder: TrajectoryBuilder, items: list[EvalOutputItem], meta: dict[str, Any]
) -> list[float]:
    """The builder's rewards of the items that have a score."""
    return [await builder.compute_reward(item, meta) for item in items if item.is_scored]


def job_name(run_id: str, epoch: int, attempt: int, target: str | None = None, job: int = 1) -> str:
    """The idempotency key of the `job`-th job of an epoch (from 0): another for each target and attempt.

    That of the first epoch of `run` is `run-epoch-1`.
    """
    whose = "" if target is None else f".{target}"
    which = "" if job == 1 else f"-job-{job}"
    return f"{run_id}-epoch-{epoch + 1}{whose}{which}" + (f"-retry-{attempt}" if attempt else "")
