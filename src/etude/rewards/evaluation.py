"""Evaluation: episodes on examples and a score for each, gathered until too much has failed."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from etude.core.episode import EpisodeRecord, Example, call_counts
from etude.core.errors import ErrorBudgetExceeded
from etude.core.evaluation import (
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluationRunOutput,
    FailureCause,
    merge_causes,
)
from etude.rewards.evaluator import unscored
from etude.rewards.scorer import Scorer, Scores
from etude.wire.retries import RetryCount, counting_retries

_CAUSES = 5
"""Causes of failures that are told apart in metrics; the others are counted by kind only."""

_SCORE = "score:"
_EXAMPLES = 3
"""Of each kind of failure, shown where there are too many."""

OnEpisode: TypeAlias = Callable[[EpisodeRecord], None]
OnScore: TypeAlias = Callable[[str, EvalOutputItem], None]
"""Called with the evaluator's name and its score."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """The episodes that are asked for."""

    examples: Sequence[Example]
    phase: str
    """Part of the episodes' names; tells collections apart that are not the same kind."""
    generations: int
    """Episodes on each example."""
    sampling: Mapping[str, Any] | None
    """Fields of `Sampling` that go before the models' own."""
    on_episode: OnEpisode | None
    """Called with each episode when it ends; what it raises ends the run."""
    on_score: OnScore | None
    """Called with each score when it is made; what it raises ends the run."""
    keep_episodes: bool
    """Without, items come back without their episode, so that memory does not grow with the calls."""
    widths: Any
    """Answers for each turn of a protocol, in place of the workflow's own: as its `widths` are, or None."""


class Evaluation(ABC):
    """Runs and scores episodes: `run` is what is called, `answer` is what a subclass does."""

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
        """Run `generations` episodes on each example; items come back by example, then generation.

        The arguments are the fields of `EvaluationRequest`. Raises ErrorBudgetExceeded when too many
        episodes or scores failed, and what a callback raises.
        """
        return await self.answer(
            EvaluationRequest(
                examples, phase, generations, sampling, on_episode, on_score, keep_episodes, widths
            )
        )

    @abstractmethod
    async def answer(self, request: EvaluationRequest) -> EvaluationRunOutput:
        """The episodes and scores that are asked for."""


def item_of(record: EpisodeRecord) -> EvalInputItem:
    """An episode as evaluators see it."""
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


def summary_of(outputs: list[EvalOutputItem]) -> EvalOutput:
    """One evaluator's scores with their mean, which is None where nothing was scored."""
    values = [output.score for output in outputs if output.is_scored and output.score is not None]
    mean = math.fsum(values) / len(values) if values else None
    return EvalOutput(average_score=mean, eval_output_items=outputs)


def together(outputs: Sequence[EvaluationRunOutput]) -> EvaluationRunOutput:
    """Several collections as one."""
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
        evaluation_results=[(name, summary_of(given)) for name, given in scores.items()],
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
    """The share of episodes, or of one evaluator's scores, that may fail; and all that has failed so far."""

    share: float
    episodes: int
    """Episodes of the whole run, those to come included."""
    failed_episodes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Failed episodes by kind, and failed scores as `score:<evaluator>`."""
    failures: list[FailureCause] = field(default_factory=list)

    def add(self, kind: str, episode_id: str, reason: str) -> None:
        """Count what failed. Raises ErrorBudgetExceeded as soon as the run cannot end within the budget."""
        self.counts[kind] += 1
        self.failed_episodes += not kind.startswith(_SCORE)
        self.failures.append(FailureCause(kind=kind, reason=reason, count=1, episode=episode_id))
        self.check(self.episodes)

    def check(self, scores: int) -> None:
        """Raises ErrorBudgetExceeded when too many episodes failed, or too many of so many `scores` of an
        evaluator."""
        if self.failed_episodes > self.share * self.episodes:
            raise self._exceeded(f"{self.failed_episodes} of {self.episodes} episodes failed")
        for kind, failed in self.counts.items():
            if kind.startswith(_SCORE) and failed > self.share * scores:
                evaluator = kind.removeprefix(_SCORE)
                raise self._exceeded(f"{failed} of {scores} episodes have no score from '{evaluator}'")

    def _exceeded(self, excess: str) -> ErrorBudgetExceeded:
        """The error: each kind with its count and its first examples, the most frequent first."""
        lines = [f"{excess}, more than the error budget of {100 * self.share:g} % allows:"]
        for kind, count in self.counts.most_common():
            of_kind = [failure for failure in self.failures if failure.kind == kind]
            lines.append(f"  {kind}: {count}")
            lines += [f"    {failure.episode}: {failure.reason}" for failure in of_kind[:_EXAMPLES]]
        lines.append(
            "All other episodes and scores are kept. Mend the cause and resume the run, or raise the budget."
        )
        return ErrorBudgetExceeded("\n".join(lines))


class Gathering:
    """Scores episodes in whatever order they come, and puts the results in the order of the examples."""

    def __init__(
        self,
        order: Sequence[tuple[str, int]],
        scorer: Scorer,
        error_budget: float,
        *,
        keep_episodes: bool = True,
        on_episode: OnEpisode | None = None,
        on_score: OnScore | None = None,
        settle: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`order` has the example's id and the generation of each episode, as they are to come back.

        `settle` is waited for before too many failures end the run.
        """
        self._order = order
        self._group_sizes = Counter(example_id for example_id, _ in order)
        self._scorer = scorer
        self._budget = ErrorBudget(error_budget, len(order))
        self._keep_episodes = keep_episodes
        self._on_episode = on_episode
        self._on_score = on_score
        self._settle = settle
        self._waiting: dict[str, list[tuple[EpisodeRecord, EvalInputItem, Scores]]] = {}
        self._done: dict[tuple[str, int], tuple[EvalInputItem, Scores]] = {}
        self._calls: Counter[str] = Counter()
        self._retries = RetryCount()

    async def output_of(self, records: AsyncGenerator[EpisodeRecord]) -> EvaluationRunOutput:
        """Have all episodes scored. Not too many wait for their scores, so that memory stays flat.

        Raises ErrorBudgetExceeded when too much failed, and what `records` or a callback raises.
        """
        slots = asyncio.Semaphore(2 * self._scorer.max_concurrency)

        async def take(record: EpisodeRecord) -> None:
            try:
                # Those of the evaluators' models; the episode's own are in its record.
                with counting_retries() as count:
                    await self._take(record)
                self._retries.add(count.causes, count.waited)
            except ErrorBudgetExceeded:
                if self._settle is not None:
                    await self._settle()
                raise
            finally:
                slots.release()

        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks, aclosing(records):
                async for record in records:
                    await slots.acquire()
                    tasks.create_task(take(record))
        except BaseExceptionGroup as group:
            failure = group
        # The first error is raised; the others are of tasks that it stopped.
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if failure is not None:
            raise failure
        # All that is known now counts: of the scores, those of episodes that have an output.
        self._budget.check(self._budget.episodes - self._budget.failed_episodes)
        done = [self._done[key] for key in self._order]
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[item for item, _ in done]),
            evaluation_results=[
                (name, summary_of([scores[name] for _, scores in done])) for name in self._scorer.names
            ],
            workflow_interrupted=self._budget.failed_episodes > 0,
            failures=dict(self._budget.counts),
            causes=merge_causes(self._budget.failures)[:_CAUSES],
            calls=dict(self._calls),
            retried=self._retries.causes,
            waited_seconds=self._retries.waited,
        )

    async def _take(self, record: EpisodeRecord) -> None:
        """Score an episode, and with it its example's others when it is the last of them."""
        if self._on_episode is not None:
            self._on_episode(record)
        for name, count in call_counts(record).items():
            self._calls[name] += count
        for call in record.calls:
            self._retries.add(call.retried, call.waited)
        item = item_of(record)
        scores: Scores = {}
        if record.failure is None:
            scores = await self._scorer.score_single(item)
        if not self._scorer.needs_groups:
            await self._finish(record, item, scores)
            return
        group = self._waiting.setdefault(item.id, [])
        group.append((record, item, scores))
        if len(group) < self._group_sizes[item.id]:
            return
        group = sorted(self._waiting.pop(item.id), key=lambda scored: scored[0].generation)
        with_output = [(item, scores) for record, item, scores in group if record.failure is None]
        compared = await self._scorer.score_group([item for item, _ in with_output])
        for (_, scores), relative in zip(with_output, compared, strict=True):
            scores |= relative
        for scored in group:
            await self._finish(*scored)

    async def _finish(self, record: EpisodeRecord, item: EvalInputItem, scores: Scores) -> None:
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
        if record.failure is not None:
            self._budget.add(record.failure.kind, record.id, record.failure.reason)
            return
        for name, output in scores.items():
            if output.error is not None:
                self._budget.add(f"{_SCORE}{name}", record.id, output.error)
