"""The values of an evaluation run: episodes in, scores out."""

import math
import re
from collections.abc import Iterable
from itertools import compress
from typing import Annotated, Any, Self, TypeAlias

from pydantic import AfterValidator, Field

from etude.core.data_model import DataModel, Id, Number
from etude.core.episode import EpisodeRecord
from etude.core.stats import Bounds, shared_bounds

LARGEST_SCORE = 1e30
"""The largest absolute score. Sums, squares and float32 tensors of larger ones would be infinite."""


def is_score(value: float) -> bool:
    """Return whether a number can be a score: one that can be averaged and trained on."""
    return math.isfinite(value) and abs(value) <= LARGEST_SCORE


def rising(bounds: Bounds) -> Bounds:
    """Return the bounds as floats. Raises ValueError if they are not two rising scores."""
    try:
        low, high = map(float, bounds)
        is_rising = is_score(low) and is_score(high) and low < high
    except (TypeError, ValueError, OverflowError):
        is_rising = False
    if not is_rising:
        raise ValueError(f"bounds are the lowest and highest score, as in (-1, 1), found {bounds!r:.60}")
    return low, high


ScoreBounds: TypeAlias = Annotated[Bounds, AfterValidator(rising)]
"""The lowest and the highest possible score."""


class EvalInputItem(DataModel, arbitrary_types_allowed=True):
    """One episode as an evaluator sees it."""

    id: Id
    """Id of the example."""
    generation: int = 0
    """The number of this episode among the example's parallel episodes."""
    input_obj: Any = None
    expected_output_obj: Any = None
    output_obj: Any = None
    full_dataset_entry: Any = None
    episode: EpisodeRecord | None = None


class EvalOutputItem(DataModel):
    """The score of one episode, or the reason why there is none."""

    id: Id
    generation: int = 0
    score: Number | None = None
    """None if the episode or the evaluator failed. Never a made-up zero."""
    reasoning: Any = None
    error: str | None = None
    bounds: Bounds | None = None
    """The lowest and the highest score that the evaluator can give, if it declares them."""

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
    """Mean over the scored items; None if nothing was scored."""
    eval_output_items: list[EvalOutputItem] = Field(default_factory=list)

    @property
    def bounds(self) -> Bounds | None:
        """The bounds that hold for all scores; None if one of the scores has none."""
        return shared_bounds(item.bounds for item in self.eval_output_items if item.is_scored)


class FailureCause(DataModel):
    """One cause of failures, with its count and the first episode."""

    kind: str
    """The kind of a failed episode, or `score:<evaluator>`."""
    reason: str
    """The first line of one of the messages. The others may differ in numbers."""
    count: int
    episode: str
    """The failed episode with the lowest id."""

    @property
    def key(self) -> tuple[str, str]:
        """A key that is equal for all failures of one cause."""
        return self.kind, _VARYING.sub("#", self.reason)

    def __str__(self) -> str:
        return f"{self.count} × {self.kind}: {self.reason}"


_LONGEST = 300
"""Characters of a cause."""


def merge_causes(causes: Iterable[FailureCause]) -> list[FailureCause]:
    """Merge causes that differ only in numbers, and sort them by count, the most frequent first.

    Each has the first line of its message, and the episode with the lowest id. The first episode in time
    would differ each time that the run is repeated.
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
    """True if at least one episode failed."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Failed episodes by kind, and failed scores as `score:<evaluator>`."""
    causes: list[FailureCause] = Field(default_factory=list)
    """The most frequent causes of failures, the most frequent first."""
    calls: dict[str, int] = Field(default_factory=dict)
    """Model calls: `answers` (of these, `cut_off` at the token limit), `failed` and `retries`."""
    retried: dict[str, int] = Field(default_factory=dict)
    """Retries of model calls by cause, including the calls of evaluators: `http_429`, …"""
    waited_seconds: float = 0.0
    """Seconds waited between attempts at model calls."""
    left_out: list[EvalOutputItem] = Field(default_factory=list)
    """The unscored items that `scored_by` has taken out, with the reasons."""

    def remote(self) -> dict[str, Any]:
        """Return the attempts at the episodes' model calls, all retries by cause, and the seconds waited."""
        calls = self.calls
        attempts = calls.get("answers", 0) + calls.get("failed", 0) + calls.get("retries", 0)
        waited = round(self.waited_seconds, 3)
        return {"attempts": attempts, "retried": dict(self.retried), "waited_seconds": waited}

    def scored_by(self, evaluator: str) -> Self:
        """Return the output without the episodes that the evaluator has not scored.

        The items of `eval_input` and of all evaluators keep their common order. An evaluator that did not run
        takes nothing out.
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

    def evaluator_items(self, evaluator: str) -> list[EvalOutputItem]:
        """Return one evaluator's items, in the order of `eval_input`. Raises KeyError if it is unknown."""
        return dict(self.evaluation_results)[evaluator].eval_output_items

    def scores(self) -> dict[str, list[float]]:
        """Return the scores of each evaluator, without the items that have none."""
        return {
            name: [
                item.score for item in output.eval_output_items if item.is_scored and item.score is not None
            ]
            for name, output in self.evaluation_results
        }

    def bounds(self) -> dict[str, Bounds | None]:
        """Return the bounds of each evaluator's scores."""
        return {name: output.bounds for name, output in self.evaluation_results}


_VARYING = re.compile(r"[0-9a-f]{8,}|[0-9]+", re.IGNORECASE)
"""The parts of a message that differ between failures of one cause: numbers, ids, digests."""
