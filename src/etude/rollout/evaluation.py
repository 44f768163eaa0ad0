"""Evaluation: runs episodes on examples and scores them, until too much has failed.

It can also rescore stored episodes with other evaluators, and forget failures so that they are retried.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from etude.core.episode import EpisodeRecord, Example, Failure, LoggedExample
from etude.core.errors import ErrorBudgetExceeded, RequestError, first_error
from etude.core.evaluation import (
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluationRunOutput,
    FailureCause,
    merge_causes,
)
from etude.core.interfaces import Evaluator
from etude.rollout.collector import Collector, EpisodeJob
from etude.rollout.evaluator import Scorer, Scores, no_score
from etude.store.episodes import episode_phase, episode_scores, read_episode, score_key, stored_episodes
from etude.store.journal import Journal
from etude.wire.retries import RetryCount, count_retries

_CAUSES = 5
"""Most causes of failures that metrics list. The others are only counted by kind."""

_SCORE = "score:"
_ROUNDING = 1e-9
"""Lets 29 of 100 fail where the share is 0.29: the product is slightly less."""

OnEpisode: TypeAlias = Callable[[EpisodeRecord], None]
OnScore: TypeAlias = Callable[[str, EvalOutputItem], None]
"""Called with the evaluator's name and its score."""


class Evaluation(ABC):
    """Runs and scores episodes."""

    @abstractmethod
    async def run(
        self,
        examples: Sequence[Example],
        *,
        phase: str = "",
        generations: int = 1,
        sampling: Mapping[str, Any] | None = None,
        on_episode: OnEpisode | None = None,
        on_score: OnScore | None = None,
        keep_episodes: bool = True,
        widths: Any = None,
    ) -> EvaluationRunOutput:
        """Run `generations` episodes on each example, and return items ordered by example, then generation.

        `phase` is a part of the episodes' names, which distinguishes kinds of collections. `sampling` has
        fields of `Sampling` that override the models' own. The callbacks get each episode when it ends, and
        each score when it is made; an exception from them ends the run. Without `keep_episodes`, items come
        back without their episode, so that memory does not grow with the calls. `widths` are the answers for
        each turn of a protocol, which replace the workflow's `widths`.

        Raises ErrorBudgetExceeded if too many episodes or scores failed.
        """


def call_counts(record: EpisodeRecord) -> Counter[str]:
    """Count the model calls of an episode: `answers` (of these, `cut_off`), `failed` and `retries`; and if
    there are any, `tool_calls` and by outcome `tool_error`, `tool_refused` and `tool_failed`."""
    counts = Counter(answers=0, cut_off=0, failed=0, retries=0)
    for call in record.calls:
        counts["retries"] += call.retries
        if call.completion is None:
            counts["failed"] += 1
        else:
            counts["answers"] += 1
            counts["cut_off"] += call.completion.finish_reason == "length"
    for event in record.events:
        if event.tool is not None:
            counts["tool_calls"] += 1
            if event.tool.outcome != "ok":
                counts[f"tool_{event.tool.outcome}"] += 1
    return counts


def make_item(record: EpisodeRecord) -> EvalInputItem:
    """Return an episode as evaluators see it."""
    example = record.example
    return EvalInputItem(
        id=example.id,
        generation=record.generation,
        input_obj=example.inputs,
        expected_output_obj=example.expected,
        output_obj=record.output,
        full_dataset_entry=example,
        episode=record,
    )


def summarise(outputs: list[EvalOutputItem]) -> EvalOutput:
    """Return one evaluator's scores with their mean, which is None if nothing was scored."""
    values = [output.score for output in outputs if output.is_scored and output.score is not None]
    mean = math.fsum(values) / len(values) if values else None
    return EvalOutput(average_score=mean, eval_output_items=outputs)


def merge_outputs(outputs: Sequence[EvaluationRunOutput]) -> EvaluationRunOutput:
    """Merge several collections into one."""
    scores: defaultdict[str, list[EvalOutputItem]] = defaultdict(list)
    failures, calls, retried = Counter[str](), Counter[str](), Counter[str]()
    for output in outputs:
        failures.update(output.failures)
        calls.update(output.calls)
        retried.update(output.retried)
        for name, result in output.evaluation_results:
            scores[name] += result.eval_output_items
    items = [item for output in outputs for item in output.eval_input.eval_input_items]
    return EvaluationRunOutput(
        eval_input=EvalInput(eval_input_items=items),
        evaluation_results=[(name, summarise(given)) for name, given in scores.items()],
        workflow_interrupted=any(output.workflow_interrupted for output in outputs),
        failures=dict(failures),
        causes=merge_causes(cause for output in outputs for cause in output.causes)[:_CAUSES],
        calls=dict(calls),
        retried=dict(retried),
        waited_seconds=sum(output.waited_seconds for output in outputs),
        left_out=[item for output in outputs for item in output.left_out],
    )


@dataclass(slots=True)
class ErrorBudget:
    """The share of episodes, or of one evaluator's scores, that may fail; and the failures so far."""

    share: float
    episodes: int
    """Episodes of the whole run, including future ones."""
    failed_episodes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Failed episodes by kind, and failed scores as `score:<evaluator>`."""
    failures: list[FailureCause] = field(default_factory=list)

    def add(self, kind: str, episode_id: str, reason: str) -> None:
        """Count a failure. Raises ErrorBudgetExceeded as soon as the run cannot end within the budget."""
        self.counts[kind] += 1
        self.failed_episodes += not kind.startswith(_SCORE)
        self.failures.append(FailureCause(kind=kind, reason=reason, count=1, episode=episode_id))
        self.check(self.episodes)

    def check(self, scores: int) -> None:
        """Raise ErrorBudgetExceeded if too many episodes failed, or too many of an evaluator's `scores`."""
        if self.failed_episodes > self.share * self.episodes + _ROUNDING:
            raise self._budget_error(f"{self.failed_episodes} of {self.episodes} episodes failed")
        for kind, failed in self.counts.items():
            if kind.startswith(_SCORE) and failed > self.share * scores + _ROUNDING:
                evaluator = kind.removeprefix(_SCORE)
                raise self._budget_error(f"{failed} of {scores} episodes have no score from '{evaluator}'")

    def _budget_error(self, excess: str) -> ErrorBudgetExceeded:
        """Return the error with the most frequent causes."""
        lines = [f"{excess}, more than the error budget of {100 * self.share:g} % allows:"]
        for cause in merge_causes(self.failures)[:_CAUSES]:
            lines.append(f"  {cause.kind}: {cause.count}, as in {cause.episode}: {cause.reason}")
        lines.append(
            "All other episodes and scores are kept. Fix the cause and resume the run, or raise the budget."
        )
        return ErrorBudgetExceeded("\n".join(lines))


@dataclass(eq=False)
class ScoreCollector:
    """Scores episodes in any order of arrival, and returns the results in the order of the examples."""

    order: Sequence[tuple[str, int]]
    """The example's id and the generation of each episode, in the order of the results."""
    scorer: Scorer
    error_budget: float
    keep_episodes: bool = True
    on_episode: OnEpisode | None = None
    on_score: OnScore | None = None
    wait_for_calls: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Entered before too many failures end the run, and left when no episode is played."""

    def __post_init__(self) -> None:
        self._group_sizes = Counter(example_id for example_id, _ in self.order)
        self._budget = ErrorBudget(self.error_budget, len(self.order))
        self._waiting: dict[str, list[tuple[EpisodeRecord, EvalInputItem, Scores]]] = {}
        self._done: dict[tuple[str, int], tuple[EvalInputItem, Scores]] = {}
        self._calls: Counter[str] = Counter()
        self._retries = RetryCount()

    async def score_all(self, records: AsyncGenerator[EpisodeRecord]) -> EvaluationRunOutput:
        """Score all episodes. Few wait for their scores at a time, so that memory stays flat.

        Raises ErrorBudgetExceeded if too much failed, and any exception of `records` or a callback.
        """
        slots = asyncio.Semaphore(2 * self.scorer.max_concurrency)

        async def take(record: EpisodeRecord) -> None:
            try:
                # Retries of the evaluators' models. The episode's own are in its record.
                with count_retries() as count:
                    await self._take(record)
                self._retries.add(count.causes, count.waited)
            except ErrorBudgetExceeded:
                await stop.enter_async_context(self.wait_for_calls())
                raise
            finally:
                slots.release()

        failure: BaseException | None = None
        try:
            async with AsyncExitStack() as stop, asyncio.TaskGroup() as tasks, aclosing(records):
                async for record in records:
                    await slots.acquire()
                    tasks.create_task(take(record))
        except BaseExceptionGroup as group:
            failure = group
        if failure is not None:
            raise first_error(failure)  # The others come from tasks that it stopped.
        # The final check: only episodes with an output can have scores.
        self._budget.check(self._budget.episodes - self._budget.failed_episodes)
        done = [self._done[key] for key in self.order]
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[item for item, _ in done]),
            evaluation_results=[
                (name, summarise([scores[name] for _, scores in done])) for name in self.scorer.names
            ],
            workflow_interrupted=self._budget.failed_episodes > 0,
            failures=dict(self._budget.counts),
            causes=merge_causes(self._budget.failures)[:_CAUSES],
            calls=dict(self._calls),
            retried=self._retries.causes,
            waited_seconds=self._retries.waited,
        )

    async def _take(self, record: EpisodeRecord) -> None:
        """Score an episode. If it is the last of its example, also score the group."""
        if self.on_episode is not None:
            self.on_episode(record)
        self._calls.update(call_counts(record))
        for call in record.calls:
            self._retries.add(call.retried, call.waited)
        item = make_item(record)
        scores: Scores = {}
        if record.failure is None:
            scores = await self.scorer.score_single(item)
        if not self.scorer.relative:
            await self._finish(record, item, scores)
            return
        group = self._waiting.setdefault(item.id, [])
        group.append((record, item, scores))
        if len(group) < self._group_sizes[item.id]:
            return
        group = sorted(self._waiting.pop(item.id), key=lambda scored: scored[0].generation)
        with_output = [(item, scores) for record, item, scores in group if record.failure is None]
        compared = await self.scorer.score_group([item for item, _ in with_output])
        for (_, scores), relative in zip(with_output, compared, strict=True):
            scores |= relative
        for scored in group:
            await self._finish(*scored)

    async def _finish(self, record: EpisodeRecord, item: EvalInputItem, scores: Scores) -> None:
        if record.failure is None:
            scores = await self.scorer.combine(item, scores)
        else:
            reason = f"{record.failure.kind}: {record.failure.reason}"
            scores = {name: no_score(item, reason) for name in self.scorer.names}
        kept = item if self.keep_episodes else item.model_copy(update={"episode": None})
        self._done[item.id, item.generation] = (kept, scores)
        if self.on_score is not None:
            for name, output in scores.items():
                self.on_score(name, output)
        if record.failure is not None:
            self._budget.add(record.failure.kind, record.id, record.failure.reason)
            return
        for name, output in scores.items():
            if output.error is not None:
                self._budget.add(f"{_SCORE}{name}", record.id, output.error)


@dataclass(eq=False)
class JournalledEvaluation(Evaluation):
    """Runs the workflow on examples and scores every episode; each episode and score is a journalled step.

    A failed episode or score is kept with its reason and counted. It is never a zero.
    """

    collector: Collector
    evaluators: Mapping[str, Evaluator]
    journal: Journal
    error_budget: float = 0.2
    """The share of episodes, or of one evaluator's scores, that may fail."""
    timeout: float = 300.0
    """Seconds for one evaluation, unless the evaluator has its own."""
    max_concurrency: int = 16
    """Evaluations that run at the same time, in addition to the collector's episodes."""

    def __post_init__(self) -> None:
        self._scorer = Scorer(self.evaluators, self.journal, self.timeout, self.max_concurrency)

    async def run(
        self,
        examples: Sequence[Example],
        *,
        phase: str = "",
        generations: int = 1,
        sampling: Mapping[str, Any] | None = None,
        widths: Any = None,
        **options: Any,
    ) -> EvaluationRunOutput:
        """Run and score the episodes that the journal does not have yet.

        `phase` is unique for each set of weights. An episode is named `<phase>/<example>/<generation>`. If
        too much failed, failures are forgotten, so that a resumed run retries them.
        """
        counts = Counter(example.id for example in examples)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise RequestError(f"{len(twice)} example ids occur more than once; the first is {twice[0]!r}")
        phase, jobs = phase or "eval", list[EpisodeJob]()
        for example in examples:
            # A logged example gets a job for each of its episodes.
            logged = example if isinstance(example, LoggedExample) else None
            plain = example if logged is None else Example(example.id, example.inputs, example.expected)
            for generation in range(generations if logged is None else logged.episodes):
                name = f"{phase}/{example.id}/{generation}"
                jobs.append(EpisodeJob(name, plain, generation, sampling or {}, logged, widths))
        gathering = ScoreCollector(
            [(job.example.id, job.generation) for job in jobs],
            self._scorer,
            self.error_budget,
            wait_for_calls=self.collector.wait_for_calls,
            **options,
        )
        try:
            return await gathering.score_all(self.collector.collect(jobs))
        except ErrorBudgetExceeded:
            # Failures of episodes that were not yet counted are forgotten too. Pending writes must be
            # committed first, since the loop reads only committed records.
            await self.journal.flush()
            for job in jobs:
                is_failed = (self.journal.get(job.id) or {}).get("failure") is not None
                for key in [job.id] if is_failed else _failed_scores(self.journal, job.id):
                    await self.journal.forget(key)
            raise


async def rescore(
    journal: Journal,
    evaluators: Mapping[str, Evaluator],
    *,
    phase: str,
    label: str,
    error_budget: float = 0.2,
    timeout: float = 300.0,  # noqa: ASYNC109 - of one evaluation, not of the whole
    max_concurrency: int = 16,
    **options: Any,
) -> EvaluationRunOutput:
    """Score the stored episodes of a phase; items come back by the example's id, then generation.

    The scores are kept under `<episode id>/rescore:<label>/<evaluator>`, next to the run's own scores. A
    second call with the same label returns the stored scores, so use another label if an evaluator has
    changed. The other arguments are the same as for `JournalledEvaluation` and its `run`.

    Raises RequestError if the phase has no episodes, and ErrorBudgetExceeded if too many scores failed.
    """
    ids = {
        (data["example"]["id"], data["generation"]): key
        for key, data in stored_episodes(journal, f"{phase}/")
        if episode_phase(data) == phase
    }
    if not ids:
        raise RequestError(f"{journal.path} has no episodes of the phase '{phase}'")
    order = sorted(ids)
    scorer = Scorer(
        evaluators, journal, timeout=timeout, max_concurrency=max_concurrency, label=f"rescore:{label}"
    )
    gathering = ScoreCollector(order, scorer, error_budget, **options)

    async def records() -> AsyncGenerator[EpisodeRecord]:
        for key in order:
            record = read_episode(journal, ids[key])
            if record is not None:
                yield record

    try:
        return await gathering.score_all(records())
    except ErrorBudgetExceeded:
        await journal.flush()  # As in `JournalledEvaluation.run`.
        for episode_id in ids.values():
            for score in _failed_scores(journal, episode_id, f"rescore:{label}"):
                await journal.forget(score)
        raise


async def forget_failures(journal: Journal, is_open: Callable[[str], bool]) -> Counter[str]:
    """Forget failures that the agent did not cause, and return their number by kind.

    These are episodes whose model, tool or environment failed, and scores that an evaluator failed to give
    (`score:<evaluator>`). Only the end of an episode is forgotten: answered calls are kept. Only episodes
    whose id passes `is_open` are examined. Raises StoreError.
    """
    failures: dict[str, str] = {}
    for key, data in stored_episodes(journal):
        if not is_open(key):
            continue
        if data["failure"] is None:
            names = _failed_scores(journal, key).items()
            failures |= {score: f"{_SCORE}{name}" for score, name in names}
        elif (failure := Failure(*data["failure"])).origin != "agent":
            failures[key] = failure.kind
    for key in failures:
        await journal.forget(key)
    return Counter(failures.values())


def _failed_scores(journal: Journal, episode_id: str, label: str = "score") -> dict[str, str]:
    """Return the keys of an episode's scores that failed, each with the evaluator's name."""
    scores = episode_scores(journal, episode_id, label).items()
    return {score_key(episode_id, name, label): name for name, row in scores if row.get("error") is not None}
