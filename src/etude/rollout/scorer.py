"""Scores episodes with several evaluators, tolerates their failures, and journals each score."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from etude.config.import_path import where_raised
from etude.core import threads
from etude.core.data_model import name_type
from etude.core.episode import EpisodeRecord
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.core.threads import run_apart, stop_tasks
from etude.engines.meter import asking_for
from etude.rollout.collector import no_exit
from etude.rollout.evaluator import WeightedEvaluator, as_evaluator, scored, unscored
from etude.store.journal import Journal, Steps

Scores = dict[str, EvalOutputItem]
"""The scores of one episode, by evaluator."""

_TIMES = ("began", "seconds")


class Scorer:
    """Scores episodes that have an output, and never scores one twice.

    A score, or a failure, is kept under `<episode id>/<label>/<evaluator>`. An evaluator that a weighted
    evaluator combines runs only once, even if it is also configured alone.
    """

    def __init__(
        self,
        evaluators: Mapping[str, Evaluator],
        journal: Steps,
        *,
        timeout: float,
        max_concurrency: int,
        label: str = "score",
    ) -> None:
        """`timeout` is for one evaluation, in seconds; at most `max_concurrency` run at once.

        Raises RequestError for two evaluators of one name.
        """
        self.names = tuple(evaluators)
        self.max_concurrency = max_concurrency
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
        if self._all().get(name, evaluator) is not evaluator:
            raise RequestError(
                f"two evaluators are called '{name}', which a weighted evaluator uses; rename one of them"
            )
        if isinstance(evaluator, WeightedEvaluator):
            for part_name, part in evaluator.parts.items():
                self._sort_in(part_name, part)
            # After its parts, so that one pass in this order finds all parts combined.
            self._weighted[name] = evaluator
        elif evaluator.is_relative:
            self._relative[name] = evaluator
        else:
            self._single[name] = evaluator

    def _all(self) -> dict[str, Evaluator]:
        return {**self._single, **self._relative, **self._weighted}

    @property
    def needs_groups(self) -> bool:
        """Whether any evaluator compares the episodes of an example."""
        return bool(self._relative)

    async def score_single(self, item: EvalInputItem) -> Scores:
        """Return the scores of the evaluators that judge each episode alone."""
        scores = await asyncio.gather(*(self._score([item], *named) for named in self._single.items()))
        return {name: outputs[0] for name, outputs in zip(self._single, scores, strict=True)}

    async def score_group(self, items: Sequence[EvalInputItem]) -> list[Scores]:
        """Return the scores of comparing evaluators; `items` are one example's episodes with an output."""
        if not items:
            return []
        scores = await asyncio.gather(*(self._score(items, *named) for named in self._relative.items()))
        return [dict(zip(self._relative, of_one, strict=True)) for of_one in zip(*scores, strict=True)]

    async def combine(self, item: EvalInputItem, scores: Scores) -> Scores:
        """Return the scores of all evaluators, in the order of the config, from the two methods above."""
        scores = dict(scores)
        for name, weighted in self._weighted.items():
            scores[name] = weighted.combine(item, scores)
            await self._keep(item, name, scores[name])
        return {name: scores[name] for name in self.names}

    def missing(self, episode: EpisodeRecord) -> list[str]:
        """Return the evaluators that judge each episode alone and have not scored this one."""
        return [
            name for name in self._single if read_score(self._journal, episode, name, self._label) is None
        ]

    async def give_up(self, item: EvalInputItem, reason: str) -> None:
        """Store the reason as the failure of each evaluator in `missing`."""
        for name in self.missing(_episode(item)):
            await self._keep(item, name, unscored(item, reason))

    async def forget_failures(self, episode_id: str, journal: Journal) -> None:
        """Forget the failed scores of an episode, so that they are made again."""
        for name in self._all():
            key = _score_key(episode_id, self._label, name)
            if (journal.get(key) or {}).get("error") is not None:
                await journal.forget(key)

    async def _score(
        self, items: Sequence[EvalInputItem], name: str, evaluator: Evaluator
    ) -> list[EvalOutputItem]:
        kept = [read_score(self._journal, _episode(item), name, self._label) for item in items]
        # A comparison covers all items together, so one missing score requires a new comparison.
        complete = [output for output in kept if output is not None]
        if len(complete) == len(items):
            return complete
        async with self._slots:
            began, clock = time.time(), time.perf_counter()
            with asking_for("judge", _episode(items[0]).id):
                outputs = await evaluate(evaluator, items, self._timeout)
            times = {"began": began, "seconds": time.perf_counter() - clock}
        pairs = zip(items, outputs, strict=True)
        await asyncio.gather(*(self._keep(item, name, out, **times) for item, out in pairs))
        return outputs

    async def _keep(self, item: EvalInputItem, name: str, output: EvalOutputItem, **times: float) -> None:
        """Store a score. `times` has the start (`began`) and the `seconds` of the evaluator, if it ran."""
        data: dict[str, Any] = {"score": output.score, "reasoning": output.reasoning, "error": output.error}
        data |= {"bounds": output.bounds} if output.bounds else {}
        data |= times
        await self._journal.put(_score_key(_episode(item).id, self._label, name), data)


def read_score(
    journal: Steps, episode: EpisodeRecord, evaluator: str, label: str = "score"
) -> EvalOutputItem | None:
    """Return the score of a stored episode, or None if there is none. Raises StoreError."""
    data = journal.get(_score_key(episode.id, label, evaluator))
    if data is None:
        return None
    result = {key: value for key, value in data.items() if key not in _TIMES}
    return EvalOutputItem(id=episode.example.id, generation=episode.generation, **result)


def _score_key(episode_id: str, label: str, evaluator: str) -> str:
    return f"{episode_id}/{label}/{evaluator}"


def _episode(item: EvalInputItem) -> EpisodeRecord:
    if item.episode is None:
        raise ValueError(f"the score of example {item.id!r} cannot be stored, because it has no episode")
    return item.episode


async def evaluate(
    evaluator: Evaluator, items: Sequence[EvalInputItem], seconds: float
) -> list[EvalOutputItem]:
    """Return one output for each of `items`, in their order, even if the evaluator fails.

    `seconds` is its timeout, unless the evaluator has its own `timeout`.
    """
    seconds = seconds if evaluator.timeout is None else evaluator.timeout
    task = await run_apart(_evaluate(evaluator, items), seconds, threads.GRACE_SECONDS)
    if not task.done():
        await stop_tasks({task}, threads.GRACE_SECONDS)
        reason = f"the evaluator took longer than {seconds:g} s"
    elif task.cancelled():
        reason = "the evaluator cancelled itself"
    elif (error := task.exception()) is None:
        return task.result()
    else:
        reason = str(error) if isinstance(error, EtudeError) else where_raised(error)
    return [unscored(item, reason) for item in items]


async def _evaluate(evaluator: Evaluator, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
    """Return the evaluator's outputs. Raises what it raises, and errors for outputs that do not fit."""
    with no_exit("the evaluator"):
        own = [_copy_item(item) for item in items]
        outputs: Sequence[Any]
        if evaluator.is_relative:
            outputs = await evaluator.evaluate_group(own)
        else:
            outputs = [await evaluator.evaluate_item(item) for item in own]
        if not isinstance(outputs, Sequence) or isinstance(outputs, str):
            raise TypeError(f"evaluate_group returned {name_type(outputs)}; return a list of scores")
        if len(outputs) != len(items):
            raise ValueError(f"evaluate_group returned {len(outputs)} scores for {len(items)} episodes")
        for item, output in zip(items, outputs, strict=True):
            is_named = isinstance(output, EvalOutputItem) and "generation" in output.model_fields_set
            if len(items) > 1 and is_named and output.generation != item.generation:
                raise ValueError(
                    f"evaluate_group returned generation {output.generation} in place of {item.generation}; "
                    "return the scores in the order of the items"
                )
        return [scored(*pair, evaluator.bounds) for pair in zip(items, outputs, strict=True)]


def _copy_item(item: EvalInputItem) -> EvalInputItem:
    """Copy the item for one evaluator, so that its changes reach neither the record nor other evaluators."""
    output, record = copy.deepcopy(item.output_obj), item.episode
    changes: dict[str, Any] = {"output_obj": output}
    if record is not None:
        example = record.example.copied()
        changes["episode"] = replace(record, example=example, output=output)
        if item.full_dataset_entry is record.example:
            changes |= {"full_dataset_entry": example, "input_obj": example.inputs}
    return item.model_copy(update=changes)
