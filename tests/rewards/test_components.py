"""The shipped evaluators by their `_type` in a config."""

from __future__ import annotations

from typing import Any

import pytest

from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.errors import ConfigError, RequestError
from etude.core.evaluation import EvalInputItem
from etude.rewards.evaluator import FunctionEvaluator, WeightedEvaluator
from etude.rewards.judge import GroupJudge, LlmJudge

HERE = "tests.rewards.test_components"


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


async def test_weights_in_a_circle_are_refused() -> None:
    one = {"_type": "weighted", "weights": {"two": 1.0}}
    two = {"_type": "weighted", "weights": {"one": 1.0}}
    async with Builder(parse_config(config(one=one, two=two))) as builder:
        with pytest.raises(RequestError, match="circle"):
            await builder.get_evaluator("one")
