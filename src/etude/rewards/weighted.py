"""Several evaluators as one: a weighted sum of their scores."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from etude.config.component import EvaluatorConfig
from etude.config.references import Refers
from etude.config.registry import register_evaluator
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.rewards.evaluator import scored, unscored
from etude.rewards.function_evaluator import as_evaluator

if TYPE_CHECKING:
    from etude.config.builder import Builder


class WeightedEvaluator(Evaluator):
    """The sum of weight times score over its parts. One part without a score leaves it without one."""

    def __init__(self, parts: Mapping[str, Evaluator], weights: Mapping[str, float]) -> None:
        """`parts` and `weights` by the same names."""
        self.parts = dict(parts)
        self.weights = dict(weights)

    @property
    def is_relative(self) -> bool:
        """Whether any part is."""
        return any(part.is_relative for part in self.parts.values())

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode with all parts."""
        return (await self.evaluate_group([item]))[0]

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        """Score all episodes of one example with all parts."""
        by_part = await asyncio.gather(*(part.evaluate_group(items) for part in self.parts.values()))
        return [
            self.combine(item, dict(zip(self.parts, scores, strict=True)))
            for item, scores in zip(items, zip(*by_part, strict=True), strict=True)
        ]

    def combine(self, item: EvalInputItem, scores: Mapping[str, EvalOutputItem]) -> EvalOutputItem:
        """The sum, from the parts' scores by name; its reasoning is the parts' scores."""
        for name in self.weights:
            if not scores[name].is_scored:
                return unscored(item, f"no score from '{name}': {scores[name].error}")
        values = {name: scores[name].score or 0.0 for name in self.weights}
        total = math.fsum(weight * values[name] for name, weight in self.weights.items())
        return scored(item, (total, values))


class WeightedEvaluatorConfig(EvaluatorConfig, name="weighted"):
    """A weighted sum of other evaluators' scores."""

    weights: Annotated[dict[str, float], Refers("evaluators")] = Field(
        min_length=1, description="The weights of other entries of `eval.evaluators`, by name."
    )

    @field_validator("weights")
    @classmethod
    def _finite(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"the weight of '{name}' must be a finite number, found {weight}")
        return weights


@register_evaluator(config_type=WeightedEvaluatorConfig)
async def weighted_evaluator(config: WeightedEvaluatorConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """A weighted sum of other evaluators' scores."""
    parts = {name: as_evaluator(await builder.get_evaluator(name)) for name in config.weights}
    yield WeightedEvaluator(parts, config.weights)
