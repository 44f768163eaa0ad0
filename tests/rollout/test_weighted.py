"""Evaluators by their `_type`, what they declare to give, and weighted sums of scores."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.episode import EpisodeRecord
from etude.core.errors import ConfigError, RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.loop.evaluation import score_statistics
from etude.rollout.evaluation import make_item, summarise
from etude.rollout.evaluator import FunctionEvaluator, Scorer, WeightedEvaluator, evaluate
from etude.rollout.judge import GroupJudge, LlmJudge
from etude.store.episodes import encode_episode
from etude.store.facts import paired_differences
from etude.store.run_folder import RunFolder

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
    assert re.search("no score from 'odd': .* None", output.error or "")


HERE = "tests.rollout.test_weighted"


def half(example: Any, output: str) -> float:
    return 0.5


def config(**evaluators: Any) -> dict[str, Any]:
    judge = {"_type": "openai", "model_name": "judge", "base_url": "http://localhost:1/v1"}
    return {"llms": {"judge": judge}, "eval": {"evaluators": evaluators}}


async def test_every_type_is_built() -> None:
    written = config(
        half=f"{HERE}:half",
        polite={"_type": "llm_judge", "model": "judge", "prompt": "Is it polite?"},
        best={"_type": "group_judge", "model": "judge"},
        total={"_type": "weighted", "weights": {"half": 1, "best": 0.5}},
    )
    async with Builder(parse_config(written)) as builder:
        half_of_it = await builder.get_evaluator("half")
        total = await builder.get_evaluator("total")
        assert isinstance(half_of_it, FunctionEvaluator)
        assert isinstance(await builder.get_evaluator("polite"), LlmJudge)
        assert isinstance(await builder.get_evaluator("best"), GroupJudge)
        assert isinstance(total, WeightedEvaluator)
        assert total.parts["half"] is half_of_it
        assert (await half_of_it.evaluate_item(EvalInputItem(id="q"))).score == 0.5


@pytest.mark.parametrize(
    ("evaluator", "complaint"),
    [
        ({"_type": "llm_judge", "model": "jugde", "prompt": "Right?"}, "did you mean 'judge'"),
        ({"_type": "weighted", "weights": {"hlaf": 1.0}}, "no evaluator 'hlaf'"),
        ({"_type": "llm_judge", "model": "judge"}, "prompt"),
        ({"_type": "group_judge", "model": "judge", "rubrik": "x"}, "did you mean 'rubric'"),
    ],
)
def test_a_config_that_cannot_work_is_refused(evaluator: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_config(config(half=f"{HERE}:half", other=evaluator))


SETTINGS = """
eval: {evaluators: {won: {_type: function, function: "a:b"}}}
finetuning: {reward_function: {name: won}}
"""


@etude.evaluator(bounds=(-1, 1))
def score(example: Any, output: str) -> float:
    return float(output)


class Own(Evaluator):
    bounds = (-2.0, 2.0)

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=float(item.output_obj))


def items(*outputs: float) -> list[EvalInputItem]:
    return [EvalInputItem(id=str(n), output_obj=str(each)) for n, each in enumerate(outputs)]


async def scores(evaluator: Evaluator, *outputs: float) -> dict[str, Any]:
    made = [output for item in items(*outputs) for output in await evaluate(evaluator, [item], 60)]
    return score_statistics(summarise(made))


@pytest.mark.parametrize("outputs", [[-1.0] * 16, [1.0] * 7 + [-1.0], [0.25], [0.5] * 3])
@pytest.mark.parametrize("evaluator", [FunctionEvaluator(score), Own()], ids=["function", "class"])
async def test_the_interval_is_within_what_the_evaluator_declares(evaluator, outputs):
    found = await scores(evaluator, *outputs)
    low, high = evaluator.bounds
    assert found["bounds"] == [low, high]
    assert low <= found["low"] <= found["mean"] <= found["high"] <= high
    assert found["low"] < found["high"]


def score_float(example: Any, output: str) -> float:
    return float(output)


@pytest.mark.parametrize("bounds", [(1, -1), (0, 0), (0, float("inf")), (0,), "ab", 3])
def test_impossible_bounds_are_refused(bounds):
    said = r"evaluator .*: bounds .* \(-1, 1\), found "
    with pytest.raises(RequestError, match=said):
        FunctionEvaluator(etude.evaluator(bounds=bounds)(lambda example, output: 0.0))


async def test_a_weighted_sum_derives_its_own():
    whole = WeightedEvaluator({"won": FunctionEvaluator(score), "own": Own()}, {"won": 1.0, "own": -0.5})
    assert (await scores(whole, 1.0, -1.0))["bounds"] == [-2.0, 2.0]
    part = WeightedEvaluator(
        {"won": FunctionEvaluator(score), "x": FunctionEvaluator(score_float)}, {"won": 1.0, "x": 1.0}
    )
    assert "bounds" not in await scores(part, 1.0, -1.0), "one part may be anything"


async def test_scores_that_are_read_back_have_their_bounds(tmp_path: Path):
    """A resumed run gives the same interval, and two runs are compared within the bounds of both."""
    example = etude.Example("a", {"q": 1})
    record, paths = EpisodeRecord("eval/a/0", example, 0, output="-1"), []
    for name in ("one", "two"):
        with RunFolder.create(tmp_path, name, config=SETTINGS) as run:
            for key in "ab":
                own = replace(record, id=f"eval/{key}/0", example=etude.Example(key, {"q": 1}))
                await run.journal.put(own.id, encode_episode(own, {}))
                scorer = Scorer({"won": FunctionEvaluator(score)}, run.journal, timeout=60, max_concurrency=1)
                first = await scorer.score_single(make_item(own))
                assert first["won"].bounds == (-1.0, 1.0)
                assert await scorer.score_single(make_item(own)) == first
            paths.append(run.path)
    found = paired_differences(*paths)["won"]
    assert -2.0 <= found.low < -1.0 < 1.0 < found.high <= 2.0
