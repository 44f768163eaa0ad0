"""An evaluation run: the workflow on many examples, and a score for every episode."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from etude.core.call import Sampling
from etude.core.episode import EpisodeRecord, call_counts
from etude.core.errors import ErrorBudgetExceeded, RequestError
from etude.core.evaluation import EvalInput, EvalInputItem, EvaluationRunOutput
from etude.core.example import Example
from etude.core.interfaces import Engine, Evaluator
from etude.core.stats import Estimate, estimate
from etude.rewards.evaluation import (
    Evaluation,
    EvaluationRequest,
    OnEpisode,
    OnScore,
    item_of,
    summary_of,
)
from etude.rewards.evaluator import as_evaluator, unscored
from etude.rewards.failures import ErrorBudget
from etude.rewards.scorer import Scorer, Scores
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.workflow import as_workflow
from etude.store.episodes import read_episode
from etude.store.journal import Journal


class EvaluationRun(Evaluation):
    """Runs the workflow on examples and scores every episode, each episode and score a journalled step.

    A failed episode or score is kept with its reason and counted; it is never a zero.
    """

    def __init__(
        self,
        collector: Collector,
        evaluators: Mapping[str, Evaluator],
        journal: Journal,
        *,
        error_budget: float = 0.2,
        timeout: float = 300.0,
        max_concurrency: int = 16,
    ) -> None:
        """`error_budget` is the share of episodes, or of one evaluator's scores, that may fail.

        `timeout` is for one evaluation, in seconds, where the evaluator has none of its own. At most
        `max_concurrency` evaluations run at the same time, beside the collector's episodes.
        """
        self._collector = collector
        self._journal = journal
        self._error_budget = error_budget
        self._max_concurrency = max_concurrency
        self._scorer = Scorer(evaluators, journal, timeout=timeout, max_concurrency=max_concurrency)

    async def answer(self, request: EvaluationRequest) -> EvaluationRunOutput:
        """Run and score the episodes that the journal does not have yet.

        `phase` is unique for each set of weights: an episode is called `<phase>/<example>/<generation>`,
        and one that the journal has is not run again, nor a score made again.

        Raises ErrorBudgetExceeded when too many episodes or scores failed. Those failures are then not
        kept: they are tried again when the run is resumed. Everything else is kept.
        """
        _require_unique(request.examples)
        jobs = [
            EpisodeJob(
                id=f"{request.phase or 'eval'}/{example.id}/{generation}",
                example=example,
                generation=generation,
                sampling=request.sampling or {},
            )
            for example in request.examples
            for generation in range(request.generations)
        ]
        gathering = Gathering(
            [(job.example.id, job.generation) for job in jobs],
            self._scorer,
            ErrorBudget(self._error_budget, len(jobs)),
            keep_episodes=request.keep_episodes,
            on_episode=request.on_episode,
            on_score=request.on_score,
        )
        try:
            return await gather(self._collector.collect(jobs), gathering, 2 * self._max_concurrency)
        except ErrorBudgetExceeded:
            await self._forget_failures(jobs)
            raise

    async def _forget_failures(self, jobs: Sequence[EpisodeJob]) -> None:
        """Also of episodes that were not yet counted when the run was stopped."""
        # What was being written when the run was stopped is read below only once it is committed.
        await self._journal.flush()
        for job in jobs:
            record = read_episode(self._journal, job.id, job.example)
            if record is not None and record.failure is not None:
                await self._journal.forget(job.id)
            elif record is not None:
                await self._scorer.forget_failures(job.id)


async def measure(
    workflow: Any,
    evaluator: Any,
    engine: Engine,
    examples: Sequence[Example],
    *,
    seed: int = 0,
    sampling: Sampling | None = None,
    max_concurrency: int = 64,
) -> Estimate:
    """The mean score of one episode per example, with its 95 % interval. Nothing is kept.

    `workflow` and `evaluator` are functions, decorated or plain. Raises ErrorBudgetExceeded when a
    fifth of the episodes or scores failed.
    """
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "measure.db") as journal:
        collector = Collector(
            as_workflow(workflow),
            {"policy": engine},
            journal,
            seed=seed,
            limits=Limits(max_concurrency=max_concurrency),
            sampling={"policy": sampling or Sampling()},
        )
        run = EvaluationRun(
            collector, {"reward": as_evaluator(evaluator)}, journal, max_concurrency=max_concurrency
        )
        output = await run.run(examples, phase="measure", keep_episodes=False)
    items = output.results_of("reward")
    return estimate([item.score for item in items if item.is_scored and item.score is not None])


class Gathering:
    """Scores episodes in whatever order they come, and puts the results in the order of the examples."""

    def __init__(
        self,
        order: Sequence[tuple[str, int]],
        scorer: Scorer,
        budget: ErrorBudget,
        *,
        keep_episodes: bool = True,
        on_episode: OnEpisode | None = None,
        on_score: OnScore | None = None,
    ) -> None:
        """`order` has the example's id and the generation of each episode, as they are to come back."""
        self._order = order
        self._group_sizes = Counter(example_id for example_id, _ in order)
        self._scorer = scorer
        self._budget = budget
        self._keep_episodes = keep_episodes
        self._on_episode = on_episode
        self._on_score = on_score
        self._waiting: dict[str, list[tuple[EvalInputItem, Scores]]] = {}
        self._done: dict[tuple[str, int], tuple[EvalInputItem, Scores]] = {}
        self._calls: Counter[str] = Counter()

    async def take(self, record: EpisodeRecord) -> None:
        """Score an episode, and with it its example's others when it is the last of them.

        Raises ErrorBudgetExceeded when too much has failed, and whatever a callback raises.
        """
        if self._on_episode is not None:
            self._on_episode(record)
        self._calls.update(call_counts(record))
        item = item_of(record)
        scores: Scores = {}
        if record.failure is None:
            scores = await self._scorer.score_single(item)
        if not self._scorer.needs_groups:
            await self._finish(item, scores)
            return
        group = self._waiting.setdefault(item.id, [])
        group.append((item, scores))
        if len(group) == self._group_sizes[item.id]:
            await self._finish_group(self._waiting.pop(item.id))

    def output(self) -> EvaluationRunOutput:
        """All episodes and scores. Raises ErrorBudgetExceeded when too much failed."""
        self._budget.check_all()
        done = [self._done[key] for key in self._order]
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[item for item, _ in done]),
            evaluation_results=[
                (name, summary_of([scores[name] for _, scores in done])) for name in self._scorer.names
            ],
            workflow_interrupted=self._budget.failed_episodes > 0,
            failures=dict(self._budget.tally.counts),
            causes=self._budget.tally.causes(),
            calls=dict(self._calls),
        )

    async def _finish_group(self, group: list[tuple[EvalInputItem, Scores]]) -> None:
        group.sort(key=lambda pair: pair[0].generation)
        with_output = [(item, scores) for item, scores in group if not _failed(item)]
        compared = await self._scorer.score_group([item for item, _ in with_output])
        for (_, scores), relative in zip(with_output, compared, strict=True):
            scores |= relative
        for item, scores in group:
            await self._finish(item, scores)

    async def _finish(self, item: EvalInputItem, scores: Scores) -> None:
        record = item.episode
        assert record is not None, "episodes are let go of only here"
        if record.failure is None:
            scores = await self._scorer.combine(item, scores)
        else:
            reason = f"{record.failure.kind}: {record.failure.reason}"
            scores = {name: unscored(item, reason) for name in self._scorer.names}
        kept = item if self._keep_episodes else item.model_copy(update={"episode": None})
        self._done[item.id, item.generation] = (kept, scores)
        if self._on_score is not None:
            for name, output in scores.items():
                self._on_score(name, output)
        self._count_failures(record, scores)

    def _count_failures(self, record: EpisodeRecord, scores: Scores) -> None:
        if record.failure is not None:
            self._budget.episode_failed(record.id, record.failure.kind, record.failure.reason)
            return
        for name, output in scores.items():
            if output.error is not None:
                self._budget.score_failed(record.id, name, output.error)


async def gather(
    records: AsyncGenerator[EpisodeRecord], gathering: Gathering, max_waiting: int
) -> EvaluationRunOutput:
    """Have all episodes scored. At most `max_waiting` wait for their scores, so that memory stays flat.

    Raises ErrorBudgetExceeded when too much failed, and what `records` or a callback raises.
    """
    slots = asyncio.Semaphore(max_waiting)

    async def take(record: EpisodeRecord) -> None:
        try:
            await gathering.take(record)
        finally:
            slots.release()

    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks, aclosing(records):
            async for record in records:
                await slots.acquire()
                tasks.create_task(take(record))
    except BaseExceptionGroup as group:
        failure = _first(group)
    if failure is not None:
        raise failure
    return gathering.output()


def _failed(item: EvalInputItem) -> bool:
    return item.episode is not None and item.episode.failure is not None


def _first(error: BaseException) -> BaseException:
    """The error in the group that came first; the others are of tasks that it stopped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _require_unique(examples: Sequence[Example]) -> None:
    twice = [name for name, count in Counter(example.id for example in examples).items() if count > 1]
    if twice:
        raise RequestError(f"{len(twice)} example ids are there more than once, the first is {twice[0]!r}")
