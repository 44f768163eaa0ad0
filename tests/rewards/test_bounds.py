"""Evaluators that declare what they can give: scores are held to it, and intervals are within."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.loop.evaluation import scores_of
from etude.rewards.evaluation import item_of, summary_of
from etude.rewards.evaluator import FunctionEvaluator, WeightedEvaluator
from etude.rewards.scorer import Scorer, evaluate
from etude.store.encode import encode_episode
from etude.store.facts import paired_difference
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


def float_of(example: Any, output: str) -> float:
    return float(output)


@pytest.mark.parametrize("bounds", [(1, -1), (0, 0), (0, float("inf")), (0,), "ab", 3])
def test_impossible_bounds_are_refused(bounds):
    said = r"the evaluator .*: bounds are the least score and the most, \(-1, 1\) say, found "
    with pytest.raises(RequestError, match=said):
        FunctionEvaluator(etude.evaluator(bounds=bounds)(lambda example, output: 0.0))


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
