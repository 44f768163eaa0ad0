"""Evaluation: episodes on examples and a score for each, and how far two evaluators agree."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import (
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluationRunOutput,
    FailureCause,
    without_numbers,
)
from etude.core.example import Example

_CAUSES = 5
"""Causes of failures that are told apart in metrics; the others are counted by kind only."""
_LONGEST = 200
"""Characters of a cause."""

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
    ) -> EvaluationRunOutput:
        """Run `generations` episodes on each example; items come back by example, then generation.

        The arguments are the fields of `EvaluationRequest`. Raises ErrorBudgetExceeded when too many
        episodes or scores failed, and what a callback raises.
        """
        return await self.answer(
            EvaluationRequest(
                examples, phase, generations, sampling, on_episode, on_score, keep_episodes=keep_episodes
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
        causes=merge_causes(cause for output in outputs for cause in output.causes),
        calls=dict(calls),
        retried=dict(retried),
        waited_seconds=sum(output.waited_seconds for output in outputs),
        left_out=[item for output in outputs for item in output.left_out],
    )


def merge_causes(causes: Iterable[FailureCause]) -> list[FailureCause]:
    """The causes with those that differ in numbers only added up: the most frequent, in that order.

    Of each the first line of the message, and the episode that comes first by its id: not the first one in
    time, which would be another one each time that the run is made.
    """
    merged: dict[tuple[str, str], FailureCause] = {}
    for cause in causes:
        line = next((line.strip() for line in cause.reason.splitlines() if line.strip()), "no message")
        reason = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
        key = cause.kind, without_numbers(reason)
        cause = cause.model_copy(update={"reason": reason})
        known = merged.get(key)
        count = cause.count + (known.count if known else 0)
        first = min(known or cause, cause, key=lambda each: each.episode)
        merged[key] = first.model_copy(update={"count": count})
    return sorted(merged.values(), key=lambda cause: (-cause.count, cause.kind, cause.reason))[:_CAUSES]


_ATTEMPTS = 64
"""Of one example that are compared, so that an epoch of few examples with many episodes takes no longer."""


def agreements(output: EvaluationRunOutput, pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """For pairs of evaluators, a judge and a check: how often the judge sees two attempts as the check does.

    By judge and by check: `share`, over the `pairs` of attempts at one example to which the check gives
    different scores, of those that the judge scores the same way round, where a tie counts half; and whether
    the check `is_check`: all of its scores are 0 or 1. Pairs of evaluators that tell nothing are left out.
    """
    results = dict(output.evaluation_results)
    figures: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for judge, check in pairs:
        if judge in results and check in results:
            judged, checked = results[judge].eval_output_items, results[check].eval_output_items
            if (figure := _agreement(judged, checked)) is not None:
                figures[judge][check] = figure
    return dict(figures)


def _agreement(judged: Sequence[EvalOutputItem], checked: Sequence[EvalOutputItem]) -> dict[str, Any] | None:
    groups: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    scores = set()
    for judged_item, checked_item in zip(judged, checked, strict=True):
        if judged_item.is_scored and checked_item.is_scored:
            assert judged_item.score is not None and checked_item.score is not None
            groups[checked_item.id].append((judged_item.score, checked_item.score))
            scores.add(checked_item.score)
    alike, count = 0.0, 0
    for group in groups.values():
        for (judgement, check), (other, other_check) in combinations(group[:_ATTEMPTS], 2):
            if check != other_check:
                count += 1
                same_way = (judgement > other) == (check > other_check)
                alike += 0.5 if judgement == other else float(same_way)
    if not count:
        return None
    return {"share": alike / count, "pairs": count, "is_check": scores <= {0.0, 1.0}}
