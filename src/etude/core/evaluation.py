"""The values of an evaluation run: episodes in, scores out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import compress
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field

from etude.core.data_model import DataModel, Id, Number
from etude.core.episode import EpisodeRecord
from etude.core.stats import Bounds, shared_bounds

LARGEST_SCORE = 1e30
"""Of larger ones sums, squares and float32 tensors are infinite."""


def is_score(value: float) -> bool:
    """Whether a number can be a score: one that can be averaged and trained on."""
    return math.isfinite(value) and abs(value) <= LARGEST_SCORE


def rising(bounds: Bounds) -> Bounds:
    """The bounds as floats. Raises ValueError for what are none."""
    try:
        low, high = map(float, bounds)
        is_rising = is_score(low) and is_score(high) and low < high
    except (TypeError, ValueError, OverflowError):
        is_rising = False
    if not is_rising:
        raise ValueError(f"bounds are the least score and the most, (-1, 1) say, found {bounds!r:.60}")
    return low, high


ScoreBounds: TypeAlias = Annotated[Bounds, AfterValidator(rising)]
"""The least and the most that a score can be."""


class EvalInputItem(DataModel, arbitrary_types_allowed=True):
    """One episode as an evaluator sees it."""

    id: Id
    """Id of the example."""
    generation: int = 0
    """Which of the example's parallel episodes."""
    input_obj: Any = None
    expected_output_obj: Any = None
    output_obj: Any = None
    full_dataset_entry: Any = None
    episode: EpisodeRecord | None = None


class EvalOutputItem(DataModel):
    """The score of one episode, or why there is none."""

    id: Id
    generation: int = 0
    score: Number | None = None
    """None when the episode or the evaluator failed. Never a made-up zero."""
    reasoning: Any = None
    error: str | None = None
    bounds: Bounds | None = None
    """The least and the most that the evaluator can give, where it declares that."""

    @property
    def is_scored(self) -> bool:
        """Whether there is a score that can be averaged."""
        return self.error is None and self.score is not None and is_score(self.score)


class EvalInput(DataModel):
    """All episodes of an evaluation run."""

    eval_input_items: list[EvalInputItem] = Field(default_factory=list)


class EvalOutput(DataModel):
    """All scores of one evaluator."""

    average_score: float | None = None
    """Mean over the scored items; None when nothing was scored."""
    eval_output_items: list[EvalOutputItem] = Field(default_factory=list)

    @property
    def bounds(self) -> Bounds | None:
        """The bounds of all scores; None where one of them has none."""
        return shared_bounds(item.bounds for item in self.eval_output_items if item.is_scored)


class FailureCause(DataModel):
    """One cause of failures: how often it was met, and where first."""

    kind: str
    """The kind of a failed episode, or `score:<evaluator>`."""
    reason: str
    """The first line of the message, as it was the first time; alike but for numbers in the others."""
    count: int
    episode: str
    """The first episode that it was met in."""

    @property
    def key(self) -> tuple[str, str]:
        """The same for all failures of one cause."""
        return self.kind, without_numbers(self.reason)

    def __str__(self) -> str:
        return f"{self.count} × {self.kind}: {self.reason}"


_LONGEST = 200
"""Characters of a cause."""


def merge_causes(causes: Iterable[FailureCause]) -> list[FailureCause]:
    """The causes with those that differ in numbers only added up: the most frequent, in that order.

    Of each the first line of the message, and the episode that comes first by its id: not the first one in
    time, which would be another one each time that the run is made.
    """
    merged: dict[tuple[str, str], FailureCause] = {}
    for cause in causes:
        line = next((line.strip() for line in cause.reason.splitlines() if line.strip()), "no message")
        reason = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
        cause = cause.model_copy(update={"reason": reason})
        known = merged.get(cause.key)
        count = cause.count + (known.count if known else 0)
        first = min(known or cause, cause, key=lambda each: each.episode)
        merged[cause.key] = first.model_copy(update={"count": count})
    return sorted(merged.values(), key=lambda cause: (-cause.count, cause.kind, cause.reason))


class EvaluationRunOutput(DataModel):
    """The result of an evaluation run."""

    eval_input: EvalInput = Field(default_factory=EvalInput)
    evaluation_results: list[tuple[str, EvalOutput]] = Field(default_factory=list)
    workflow_interrupted: bool = False
    """True when at least one episode failed."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Failed episodes by kind, and failed scores as `score:<evaluator>`."""
    causes: list[FailureCause] = Field(default_factory=list)
    """The most frequent causes of failures, the most frequent first."""
    calls: dict[str, int] = Field(default_factory=dict)
    """Model calls: `answers`, of them `cut_off` at the limit of tokens, `failed` ones and `retries`."""
    retried: dict[str, int] = Field(default_factory=dict)
    """Attempts at model calls, those of evaluators too, that were made again, by cause: `http_429`, …"""
    waited_seconds: float = 0.0
    """Between attempts at model calls."""
    left_out: list[EvalOutputItem] = Field(default_factory=list)
    """Why there is no reward, of each episode that `scored_by` has taken out."""

    def remote(self) -> dict[str, Any]:
        """The attempts at the episodes' model calls, and all retries by cause with the seconds waited."""
        calls = self.calls
        attempts = calls.get("answers", 0) + calls.get("failed", 0) + calls.get("retries", 0)
        waited = round(self.waited_seconds, 3)
        return {"attempts": attempts, "retried": dict(self.retried), "waited_seconds": waited}

    def scored_by(self, evaluator: str) -> EvaluationRunOutput:
        """The same without the episodes that the evaluator has not scored.

        The items of all evaluators and of `eval_input` go on to stand in the same order. An evaluator that
        did not run takes nothing out.
        """
        results = dict(self.evaluation_results)
        if evaluator not in results:
            return self
        rewards = results[evaluator].eval_output_items
        scored = [item.is_scored for item in rewards]
        update: dict[str, Any] = {
            "eval_input": EvalInput(eval_input_items=[*compress(self.eval_input.eval_input_items, scored)]),
            "evaluation_results": [],
            "left_out": [item for item in rewards if not item.is_scored],
        }
        for name, result in self.evaluation_results:
            items = list(compress(result.eval_output_items, scored))
            kept = result.model_copy(update={"eval_output_items": items})
            update["evaluation_results"].append((name, kept))
        return self.model_copy(update=update)

    def results_of(self, evaluator: str) -> list[EvalOutputItem]:
        """The items of one evaluator, in the order of `eval_input`. Raises KeyError for an unknown one."""
        return dict(self.evaluation_results)[evaluator].eval_output_items

    def scores(self) -> dict[str, list[float]]:
        """The scores of each evaluator; of items that have none, nothing."""
        return {
            name: [
                item.score for item in output.eval_output_items if item.is_scored and item.score is not None
            ]
            for name, output in self.evaluation_results
        }

    def bounds(self) -> dict[str, Bounds | None]:
        """The bounds of each evaluator's scores."""
        return {name: output.bounds for name, output in self.evaluation_results}


_VARYING = re.compile(r"[0-9a-f]{8,}|[0-9]+", re.IGNORECASE)
"""The part of a message that differs between failures of one cause: numbers, ids, digests."""


def without_numbers(message: str) -> str:
    """The message with each number, id and digest in it replaced, so that those of one cause are equal."""
    return _VARYING.sub("#", message)
