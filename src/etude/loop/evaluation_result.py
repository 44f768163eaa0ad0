"""The result of an evaluation: scores with their intervals, a row for each episode."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem, EvaluationRunOutput
from etude.loop.metrics import measured_scores


@dataclass(slots=True)
class Usage:
    """What the episodes took."""

    episodes: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """Wall time of all episodes, added up; many run at once."""

    def add(self, record: EpisodeRecord) -> None:
        """Count an episode."""
        self.episodes += 1
        self.calls += len(record.calls)
        self.seconds += record.seconds
        for call in record.calls:
            if call.completion is not None:
                self.prompt_tokens += call.completion.usage.prompt_tokens
                self.completion_tokens += call.completion.usage.completion_tokens


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of an evaluation."""

    output: EvaluationRunOutput
    examples: int
    repeat: int
    greedy: bool
    reward: str | None
    """The evaluator that counts."""
    model: str
    usage: Usage = field(default_factory=Usage)

    def scores(self) -> dict[str, dict[str, Any]]:
        """By evaluator: `mean`, `low`, `high` (95 %), `n` examples, `scored` and `unscored` episodes."""
        return {name: scores_of(result.eval_output_items) for name, result in self.output.evaluation_results}

    def as_json(self) -> dict[str, Any]:
        """Everything but the items."""
        return {
            "model": self.model,
            "examples": self.examples,
            "repeat": self.repeat,
            "greedy": self.greedy,
            "reward": self.reward,
            "scores": self.scores(),
            "failures": dict(self.output.failures),
            "causes": [cause.model_dump() for cause in self.output.causes],
            "model_calls": dict(self.output.calls),
            "episodes": self.usage.episodes,
            "calls": self.usage.calls,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
        }


def scores_of(items: Sequence[EvalOutputItem]) -> dict[str, Any]:
    """Mean and 95 % interval of an evaluator's scores.

    The episodes of one example are no independent draws, so the interval is that of the examples'
    means. All None when nothing was scored.
    """
    by_example: defaultdict[str, list[float]] = defaultdict(list)
    for item in items:
        if item.is_scored and item.score is not None:
            by_example[item.id].append(item.score)
    scored = sum(map(len, by_example.values()))
    counts = {"n": len(by_example), "scored": scored, "unscored": len(items) - scored}
    return measured_scores([math.fsum(scores) / len(scores) for scores in by_example.values()]) | counts


def item_rows(output: EvaluationRunOutput) -> list[dict[str, Any]]:
    """A row for each episode: `id`, `generation`, `output`, `expected`, `scores`, `reasoning`, `errors`."""
    rows = []
    for place, item in enumerate(output.eval_input.eval_input_items):
        scores = {name: result.eval_output_items[place] for name, result in output.evaluation_results}
        rows.append(
            {
                "id": item.id,
                "generation": item.generation,
                "output": item.output_obj,
                "expected": item.expected_output_obj,
                "scores": {name: score.score for name, score in scores.items()},
                "reasoning": {
                    name: score.reasoning for name, score in scores.items() if score.reasoning is not None
                },
                "errors": {name: score.error for name, score in scores.items() if score.error is not None},
            }
        )
    return rows
