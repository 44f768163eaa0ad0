"""Scoring episodes with several evaluators, each score a step in the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.rewards.evaluator import evaluate
from etude.rewards.function_evaluator import as_evaluator
from etude.rewards.weighted import WeightedEvaluator
from etude.store.journal import Journal

T = TypeVar("T")

Scores = dict[str, EvalOutputItem]
"""The scores of one episode, by evaluator."""


class Scorer:
    """Scores episodes that have an output, and never scores one twice.

    A score is kept under `<episode id>/<label>/<evaluator>`, failures too. What a weighted evaluator
    combines is scored once, also when it counts by itself.
    """

    def __init__(
        self,
        evaluators: Mapping[str, Evaluator],
        journal: Journal,
        *,
        timeout: float,
        max_concurrency: int,
        label: str = "score",
    ) -> None:
        """`timeout` is for one evaluation, in seconds; at most `max_concurrency` run at once."""
        self.names = tuple(evaluators)
        self._journal = journal
        self._timeout = timeout
        self._label = label
        self._slots = asyncio.Semaphore(max_concurrency)
        self._single: dict[str, Evaluator] = {}
        self._relative: dict[str, Evaluator] = {}
        self._weighted: dict[str, WeightedEvaluator] = {}
        for name, evaluator in evaluators.items():
            self._sort_in(name, as_evaluator(evaluator))

    def _sort_in(self, name: str, evaluator: Evaluator) -> None:
        known = self._single.get(name) or self._relative.get(name) or self._weighted.get(name)
        if known is not None and known is not evaluator:
            raise RequestError(
                f"two evaluators are called '{name}', and a weighted evaluator combines one of them"
            )
        if isinstance(evaluator, WeightedEvaluator):
            for part_name, part in evaluator.parts.items():
                self._sort_in(part_name, part)
            # After its parts: one pass in this order then finds all parts combined.
            self._weighted[name] = evaluator
        elif evaluator.is_relative:
            self._relative[name] = evaluator
        else:
            self._single[name] = evaluator

    @property
    def needs_groups(self) -> bool:
        """Whether any evaluator compares the episodes of an example."""
        return bool(self._relative)

    async def score_single(self, item: EvalInputItem) -> Scores:
        """The scores of the evaluators that look at one episode by itself."""
        scores = await _together([self._score([item], *named) for named in self._single.items()])
        return {name: outputs[0] for name, outputs in zip(self._single, scores, strict=True)}

    async def score_group(self, items: Sequence[EvalInputItem]) -> list[Scores]:
        """The scores of the evaluators that compare; `items` are one example's episodes with an output."""
        if not items:
            return []
        scores = await _together([self._score(items, *named) for named in self._relative.items()])
        return [dict(zip(self._relative, of_one, strict=True)) for of_one in zip(*scores, strict=True)]

    async def combine(self, item: EvalInputItem, scores: Scores) -> Scores:
        """The scores of all evaluators by their order in the config, given those of the two above."""
        scores = dict(scores)
        for name, weighted in self._weighted.items():
            scores[name] = weighted.combine(item, scores)
            await self._keep(item, name, scores[name])
        return {name: scores[name] for name in self.names}

    async def forget_failures(self, episode_id: str) -> None:
        """Have the scores that an episode lacks made anew the next time."""
        for name in (*self._single, *self._relative, *self._weighted):
            key = self._key(episode_id, name)
            if (self._journal.get(key) or {}).get("error") is not None:
                await self._journal.forget(key)

    async def _score(
        self, items: Sequence[EvalInputItem], name: str, evaluator: Evaluator
    ) -> list[EvalOutputItem]:
        kept = [self._kept(item, name) for item in items]
        # A comparison holds for all of them together, so one that is missing is reason to compare anew.
        found = [output for output in kept if output is not None]
        if len(found) == len(items):
            return found
        async with self._slots:
            outputs = await evaluate(evaluator, items, self._timeout)
        await _together([self._keep(item, name, out) for item, out in zip(items, outputs, strict=True)])
        return outputs

    def _kept(self, item: EvalInputItem, name: str) -> EvalOutputItem | None:
        data = self._journal.get(self._key(_episode_id(item), name))
        return None if data is None else EvalOutputItem(id=item.id, generation=item.generation, **data)

    async def _keep(self, item: EvalInputItem, name: str, output: EvalOutputItem) -> None:
        data: dict[str, Any] = {"score": output.score, "reasoning": output.reasoning, "error": output.error}
        await self._journal.put(self._key(_episode_id(item), name), data)

    def _key(self, episode_id: str, name: str) -> str:
        return _score_key(episode_id, self._label, name)


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of what runs side by side. What is alone needs no task of its own, which costs time."""
    return [await work[0]] if len(work) == 1 else await asyncio.gather(*work)


def read_score(
    journal: Journal, episode: EpisodeRecord, evaluator: str, label: str = "score"
) -> EvalOutputItem | None:
    """The score of a stored episode, or None when there is none. Raises StoreError."""
    data = journal.get(_score_key(episode.id, label, evaluator))
    if data is None:
        return None
    return EvalOutputItem(id=episode.example.id, generation=episode.generation, **data)


def _score_key(episode_id: str, label: str, evaluator: str) -> str:
    return f"{episode_id}/{label}/{evaluator}"


def _episode_id(item: EvalInputItem) -> str:
    if item.episode is None:
        raise ValueError(f"example {item.id!r} has no episode to keep a score for")
    return item.episode.id
