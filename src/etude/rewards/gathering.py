"""Gathering: the episodes of one evaluation run as they come in, until all are scored."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeAlias

from etude.core.episode import EpisodeRecord, call_counts
from etude.core.evaluation import (
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluationRunOutput,
)
from etude.rewards.evaluator import unscored
from etude.rewards.failures import ErrorBudget
from etude.rewards.scorer import Scorer, Scores

OnEpisode: TypeAlias = Callable[[EpisodeRecord], None]
OnScore: TypeAlias = Callable[[str, EvalOutputItem], None]
"""Called with the evaluator's name and its score."""


class Gathering:
    """Scores episodes in whatever order they come, and puts the results in the order of the examples."""

    def __init__(
        self,
        places: Sequence[tuple[str, int]],
        scorer: Scorer,
        budget: ErrorBudget,
        *,
        keep_episodes: bool = True,
        on_episode: OnEpisode | None = None,
        on_score: OnScore | None = None,
    ) -> None:
        """`places` are the example's id and the generation of each episode, in the order to come back in."""
        self._places = places
        self._group_sizes = Counter(example_id for example_id, _ in places)
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
        done = [self._done[place] for place in self._places]
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[item for item, _ in done]),
            evaluation_results=[
                (name, _summary([scores[name] for _, scores in done])) for name in self._scorer.names
            ],
            workflow_interrupted=self._budget.failed_episodes > 0,
            failures=dict(self._budget.tally.counts),
            causes=self._budget.tally.causes(),
            calls=dict(self._calls),
        )

    async def _finish_group(self, group: list[tuple[EvalInputItem, Scores]]) -> None:
        group.sort(key=lambda one: one[0].generation)
        with_output = [one for one in group if not _failed(one[0])]
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


def _failed(item: EvalInputItem) -> bool:
    return item.episode is not None and item.episode.failure is not None


def _summary(outputs: list[EvalOutputItem]) -> EvalOutput:
    values = [output.score for output in outputs if output.is_scored and output.score is not None]
    average = math.fsum(values) / len(values) if values else None
    return EvalOutput(average_score=average, eval_output_items=outputs)


def _first(error: BaseException) -> BaseException:
    """The error in the group that came first; the others are of tasks that it stopped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
