"""Evaluators that declare what they can give: scores are held to it, and intervals are within."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import etude
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem, EvaluationRunOutput
from etude.core.interfaces import Evaluator
from etude.core.trajectory import TrajectoryCollection
from etude.loop.evaluation import scores_of
from etude.loop.metrics import collection_metrics, validation_metrics
from etude.rewards.evaluation import item_of, summary_of
from etude.rewards.evaluator import (
    FunctionEvaluator,
    FunctionEvaluatorConfig,
    MeasuredConfig,
    WeightedEvaluator,
)
from etude.rewards.scorer import Scorer, evaluate
from etude.store.comparison import paired_difference
from etude.store.encode import encode_episode
from etude.store.run_folder import RunFolder
from etude.store.stored_config import CONFIG, config_text

SETTINGS = """
eval: {evaluators: {won: {_type: function, function: "a:b"}}}
finetuning: {reward_function: {name: won}}
"""


@etude.evaluator(bounds=(-1, 1))
def won(example: Any, output: str) -> float:
    return float(output)


class Own(Evaluator):
    bounds = (-2.0, 2.0)

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=float(item.output_obj))


def items(*outputs: float) -> list[EvalInputItem]:
    return [EvalInputItem(id=str(n), output_obj=str(each)) for n, each in enumerate(outputs)]


async def scores(evaluator: Evaluator, *outputs: float) -> dict[str, Any]:
    made = [output for item in items(*outputs) for output in await evaluate(evaluator, [item], 60)]
    return scores_of(summary_of(made))


@pytest.mark.parametrize("outputs", [[-1.0] * 16, [1.0] * 7 + [-1.0], [0.25], [0.5] * 3])
@pytest.mark.parametrize("evaluator", [FunctionEvaluator(won), Own()], ids=["function", "class"])
async def test_the_interval_is_within_what_the_evaluator_declares(evaluator, outputs):
    found = await scores(evaluator, *outputs)
    low, high = evaluator.bounds
    assert found["bounds"] == [low, high]
    assert low <= found["low"] <= found["mean"] <= found["high"] <= high
    assert found["low"] < found["high"]


async def test_what_is_declared_counts_and_not_what_is_seen():
    """Eight halves of ±2 leave more open than eight halves of 0 to 1."""
    own, seen = await scores(Own(), *[0.5] * 8), await scores(FunctionEvaluator(float_of), *[0.5] * 8)
    assert own["low"] < 0 <= seen["low"]
    assert "bounds" not in seen


def float_of(example: Any, output: str) -> float:
    return float(output)


async def test_a_score_out_of_bounds_is_none():
    (output,) = await evaluate(FunctionEvaluator(won), items(1.5), 60)
    assert output.score is None
    assert output.error == "the evaluator returned 1.5, and declares that its scores are -1 to 1"
    (rounded,) = await evaluate(FunctionEvaluator(won), items(1 + 1e-12), 60)
    assert rounded.score == 1.0


@pytest.mark.parametrize("bounds", [(1, -1), (0, 0), (0, float("inf")), (0,), "ab", 3])
def test_impossible_bounds_are_refused(bounds):
    said = r"the evaluator .*: bounds are the least score and the most, \(-1, 1\) say, found "
    with pytest.raises(RequestError, match=said):
        FunctionEvaluator(etude.evaluator(bounds=bounds)(lambda example, output: 0.0))


def test_a_config_declares_them_too():
    assert MeasuredConfig(bounds=[-1, 1]).bounds == (-1.0, 1.0)
    assert FunctionEvaluatorConfig(function="a:b", bounds=[-1, 1]).bounds == (-1.0, 1.0)
    with pytest.raises(ValidationError, match="the least score and the most"):
        MeasuredConfig(bounds=[1, -1])


async def test_a_weighted_sum_derives_its_own():
    whole = WeightedEvaluator({"won": FunctionEvaluator(won), "own": Own()}, {"won": 1.0, "own": -0.5})
    assert (await scores(whole, 1.0, -1.0))["bounds"] == [-2.0, 2.0]
    part = WeightedEvaluator(
        {"won": FunctionEvaluator(won), "x": FunctionEvaluator(float_of)}, {"won": 1.0, "x": 1.0}
    )
    assert "bounds" not in await scores(part, 1.0, -1.0), "one part may be anything"


async def test_scores_that_are_read_back_have_their_bounds(tmp_path: Path):
    """A resumed run gives the same interval, and two runs are compared within the bounds of both."""
    example, files = etude.Example("a", {"q": 1}), {CONFIG: config_text(SETTINGS)}
    record, paths = EpisodeRecord("eval/a/0", example, 0, output="-1"), []
    for name in ("one", "two"):
        with RunFolder.create(tmp_path, name, files=files) as run:
            for key in "ab":
                own = replace(record, id=f"eval/{key}/0", example=etude.Example(key, {"q": 1}))
                await run.journal.put(own.id, encode_episode(own, {}))
                scorer = Scorer({"won": FunctionEvaluator(won)}, run.journal, timeout=60, max_concurrency=1)
                first = await scorer.score_single(item_of(own))
                assert first["won"].bounds == (-1.0, 1.0)
                assert await scorer.score_single(item_of(own)) == first
            paths.append(run.path)
    found = paired_difference(*paths)
    assert found is not None and -2.0 <= found.low < -1.0 < 1.0 < found.high <= 2.0


async def test_episodes_of_a_run_have_the_interval_of_the_declared_bounds():
    """A reward that is always -1, and could be -2."""
    lost = etude.evaluator(bounds=(-2, 2))(lambda example, output: -1.0)
    output = EvaluationRunOutput(evaluation_results=[("lost", summary_of([*await _made(lost, 16)]))])
    metrics = validation_metrics(output, "lost")
    assert -2.0 < metrics["reward_low"] < -1.0 < metrics["reward_high"] < 0.0
    assert metrics["evaluators"]["lost"]["bounds"] == [-2.0, 2.0]
    collection = TrajectoryCollection(run_id="r")
    facts = {"rewards": [-1.0] * 16, "scores": output.scores()}
    facts |= {"bounds": output.bounds(), "reward": "lost"}
    epoch = collection_metrics(collection, facts)
    assert (epoch["reward_low"], epoch["reward_high"]) == (metrics["reward_low"], metrics["reward_high"])
    shaped = collection_metrics(collection, {**facts, "rewards": [-9.0] * 16})
    assert shaped["reward_low"] is None, "the builder's own rewards are not within the evaluator's bounds"


async def _made(function: Any, count: int) -> list[EvalOutputItem]:
    return [
        output
        for item in items(*[0.0] * count)
        for output in await evaluate(FunctionEvaluator(function), [item], 60)
    ]
