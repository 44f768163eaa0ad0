"""`_type: grader` in a config, from its block to the scores of episodes."""

from __future__ import annotations

from typing import Any

import pytest

from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.errors import ConfigError
from etude.core.evaluation import EvalInputItem
from etude.core.example import Example

SIMILAR = {
    "type": "text_similarity",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.expected }} {{ item.unit }}",
    "evaluation_metric": "rouge_1",
}
TYPED = {
    "type": "python",
    "source": "def grade(sample, item): return sample['output_json']['n'] == item['id']",
}


def config(grader: dict[str, Any]) -> dict[str, Any]:
    judge = {"_type": "openai", "model_name": "judge", "base_url": "http://localhost:1/v1"}
    return {
        "llms": {"judge": judge},
        "eval": {"evaluators": {"reward": {"_type": "grader", "grader": grader}}},
    }


def item_of(output: Any, **inputs: Any) -> EvalInputItem:
    example = Example("7", inputs, "12")
    return EvalInputItem(id="7", output_obj=output, expected_output_obj="12", full_dataset_entry=example)


async def test_episodes_are_scored_by_a_grader_of_the_config() -> None:
    spec = {"type": "multi", "graders": {"similar": SIMILAR}, "calculate_output": "2 * similar - 1"}
    async with Builder(parse_config(config(spec))) as builder:
        evaluator = await builder.get_evaluator("reward")
        scored = await evaluator.evaluate_item(item_of("12 apples", unit="pears"))
        assert scored.score == 0.0 and scored.reasoning == {"similar": 0.5}
        assert (await evaluator.evaluate_item(item_of("12 pears", unit="pears"))).score == 1.0
        missing = await evaluator.evaluate_item(item_of("12 pears"))
        assert missing.score is None and "no 'unit'" in str(missing.error)


async def test_an_output_that_is_not_text_is_json() -> None:
    async with Builder(parse_config(config(TYPED))) as builder:
        evaluator = await builder.get_evaluator("reward")
        assert (await evaluator.evaluate_item(item_of({"n": "7"}))).score == 1.0
        assert (await evaluator.evaluate_item(item_of('{"n": 8}'))).score == 0.0
        broken = await evaluator.evaluate_item(item_of("no JSON"))
        assert broken.score is None and "python_grader_runtime_error" in str(broken.error)


@pytest.mark.parametrize(
    ("grader", "complaint"),
    [
        (SIMILAR | {"evaluation_metric": "cosine"}, "embeds texts"),
        (SIMILAR | {"input": "{{ output }}"}, "no variable"),
        ({"type": "score_model", "model": "jugde", "input": [{"role": "user", "content": "?"}]}, "'judge'"),
        ({"type": "endpoint"}, "reward.grader: expected"),
    ],
)
def test_a_grader_that_cannot_work_is_refused_with_the_config(grader: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_config(config(grader))
