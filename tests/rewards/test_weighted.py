"""Weighted sums of scores."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.rewards.evaluator import FunctionEvaluator, WeightedEvaluator
from etude.rewards.scorer import evaluate

ITEM = EvalInputItem(id="q", output_obj="x")


def constant(value: object) -> FunctionEvaluator:
    return FunctionEvaluator(lambda example, output: value)


async def test_the_score_is_the_weighted_sum_and_the_reasoning_its_parts() -> None:
    both = WeightedEvaluator({"right": constant(1.0), "long": constant(4)}, {"right": 0.75, "long": -0.125})
    (output,) = await evaluate(both, [ITEM], 5)
    assert output.score == 0.25
    assert output.reasoning == {"right": 1.0, "long": 4.0}


async def test_a_part_without_a_score_leaves_the_whole_without_one() -> None:
    both = WeightedEvaluator({"right": constant(1.0), "odd": constant(None)}, {"right": 1, "odd": 0})
    (output,) = await evaluate(both, [ITEM], 5)
    assert output.score is None
    assert "no score from 'odd': the evaluator returned None" in (output.error or "")


@given(st.dictionaries(st.text(), st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1))
def test_any_weights(pairs: dict[str, tuple[float, float]]) -> None:
    weights = {name: weight for name, (weight, _) in pairs.items()}
    scores = {name: EvalOutputItem(id="q", score=score) for name, (_, score) in pairs.items()}
    combined = WeightedEvaluator({name: constant(0) for name in pairs}, weights).combine(ITEM, scores)
    assert combined.score == math.fsum(weight * score for weight, score in pairs.values())
