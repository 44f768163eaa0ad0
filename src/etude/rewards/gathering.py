"""Gathering the scores of episodes, and when too much has failed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from etude.core.episode import EpisodeRecord, call_counts, retry_counts
from etude.core.errors import ErrorBudgetExceeded
from etude.core.evaluation import EvalInput, EvalInputItem, EvaluationRunOutput, FailureCause
from etude.rewards.evaluation import OnEpisode, OnScore, item_of, merge_causes, summary_of
from etude.rewards.evaluator import unscored
from etude.rewards.scorer import Scorer, Scores
from etude.wire.retries import counting_retries

_EXAMPLES = 3
"""Of each kind of failure, shown where there are too many."""


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

    def episode_failed(self, episode_id: str, kind: str, reason: str) -> None:
        """Count it. Raises ErrorBudgetExceeded as soon as the run cannot end within the budget."""
        self.failed_episodes += 1
        self._add(kind, episode_id, reason)

    def score_failed(self, episode_id: str, evaluator: str, reason: str) -> None:
        """Count it. Raises ErrorBudgetExceeded as soon as the run cannot end within the budget."""
        self._add(f"score:{evaluator}", episode_id, reason)

    def check_all(self) -> None:
        """Raises ErrorBudgetExceeded when the run, now at its end, went over the budget."""
        self._check(self.episodes - self.failed_episodes)

    def _add(self, kind: str, episode_id: str, reason: str) -> None:
        self.counts[kind] += 1
        self.failures.append(FailureCause(kind=kind, reason=reason, count=1, episode=episode_id))
        self._check(self.episodes)

    def _check(self, scores: int) -> None:
        """Raises when too many episodes failed, or too many of so many `scores` of an evaluator."""
        if self.failed_episodes > self.share * self.episodes:
            raise self._exceeded(f"{self.failed_episodes} of {self.episodes} episodes failed")
        for kind, failed in self.counts.items():
            if kind.startswith("score:") and failed > self.share * scores:
                evaluator = kind.removeprefix("score:")
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
        self._retried: Counter[str] = Counter()
        self._waited = 0.0

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
                self._add_retries(count.causes, count.waited)
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
        return self._output()

    async def _take(self, record: EpisodeRecord) -> None:
        """Score an episode, and with it its example's others when it is the last of them."""
        if self._on_episode is not None:
            self._on_episode(record)
        for name, count in call_counts(record).items():
            self._calls[name] += count
        self._add_retries(*retry_counts(record))
        item = item_of(record)
        scores: Scores = {}
        if record.failure is None:
            scores = await self._scorer.score_single(item)
        if not self._scorer.needs_groups:
            await self._finish(record, item, scores)
            return
        group = self._waiting.setdefault(item.id, [])
        group.append((record, item, scores))
        if len(group) == self._group_sizes[item.id]:
            await self._finish_group(self._waiting.pop(item.id))

    def _add_retries(self, causes: Mapping[str, int], waited: float) -> None:
        if causes:
            self._retried.update(causes)
            self._waited += waited

    async def _finish_group(self, group: list[tuple[EpisodeRecord, EvalInputItem, Scores]]) -> None:
        group.sort(key=lambda scored: scored[0].generation)
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
            self._budget.episode_failed(record.id, record.failure.kind, record.failure.reason)
            return
        for name, output in scores.items():
            if output.error is not None:
                self._budget.score_failed(record.id, name, output.error)

    def _output(self) -> EvaluationRunOutput:
        self._budget.check_all()
        done = [self._done[key] for key in self._order]
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[item for item, _ in done]),
            evaluation_results=[
                (name, summary_of([scores[name] for _, scores in done])) for name in self._scorer.names
            ],
            workflow_interrupted=self._budget.failed_episodes > 0,
            failures=dict(self._budget.counts),
            causes=merge_causes(self._budget.failures),
            calls=dict(self._calls),
            retried=dict(self._retried),
            waited_seconds=self._waited,
        )
