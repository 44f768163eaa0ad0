"""Evaluation: episodes on examples and a score for each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
