"""Behaviour that the shipped builders share, on outputs written by hand."""

import asyncio
import json

import pytest

from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.grpo import Grpo
from etude.config.finetuning import FinetuneConfig, RewardFunctionConfig
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem, EvaluationRunOutput
from tests.algorithms.scripted_episodes import conversation, episode


def evaluated(*episodes_and_scores, evaluator="correct"):
    """An evaluation's output; a score may be an EvalOutputItem."""
    items, scores = [], []
    for record, score in episodes_and_scores:
        name = {"id": record.example.id, "generation": record.generation}
        items.append(EvalInputItem(**name, episode=record))
        scores.append(EvalOutputItem(**name, score=score))
    return EvaluationRunOutput(
        eval_input=EvalInput(eval_input_items=items),
        evaluation_results=[(evaluator, EvalOutput(eval_output_items=scores))],
    )


def siblings(*scores, example="e", function="<workflow>"):
    return [
        (episode(conversation("q", f"a{n}", function=function), generation=n, example=example), score)
        for n, score in enumerate(scores)
    ]


def make_builder(kind=CollectingBuilder, **settings):
    builder = kind(Grpo(**settings))
    builder.run_config = FinetuneConfig(
        reward_function=RewardFunctionConfig(name="correct"), target_model="policy"
    )
    return builder


async def finish(builder, output):
    collected = asyncio.get_running_loop().create_future()
    collected.set_result(output)
    builder.evaluation_runs["run"] = collected
    return await builder.finalize("run", {"epoch": 0})


async def test_groups_are_by_example_in_the_order_of_the_examples():
    output = evaluated(*siblings(1.0, 0.0, example="b"), *siblings(0.0, 1.0, example="a"))
    collection = await finish(make_builder(), output)
    assert [[one.metadata["id"] for one in group] for group in collection.trajectories] == [
        ["b"] * 2,
        ["a"] * 2,
    ]
    assert (collection.run_id, collection.method) == ("run", "grpo")


async def test_every_trajectory_knows_the_rewards_of_its_whole_group():
    collection = await finish(make_builder(), evaluated(*siblings(1.0, 0.5, None)))
    assert [one.group_rewards for one in collection.trajectories[0]] == [[1.0, 0.5]] * 2


async def test_what_has_no_reward_is_left_out_and_counted():
    builder = make_builder()
    collection = await finish(builder, evaluated(*siblings(1.0, None, float("nan"), 0.0)))
    assert len(collection) == 2
    facts = builder.facts("run")
    assert (facts["episodes"], facts["unscored"], facts["rewards"]) == (4, 2, [1.0, 0.0])
    assert builder.facts("another run") == {}


async def test_episodes_without_a_targeted_call_are_left_out_and_counted():
    builder = make_builder()
    output = evaluated(*siblings(1.0, 0.0), *siblings(1.0, example="other", function="judge"))
    assert len(await finish(builder, output)) == 2
    assert builder.facts("run")["untargeted"] == 1


async def test_a_reward_function_that_did_not_run_is_named_with_those_that_did():
    with pytest.raises(RequestError, match=r"'correct' is not among the evaluators that ran \(style\)"):
        await finish(make_builder(), evaluated(*siblings(1.0), evaluator="style"))


async def test_a_builder_needs_a_reward_function():
    with pytest.raises(RequestError, match=r"finetuning\.reward_function\.name"):
        await CollectingBuilder(Grpo()).initialize(FinetuneConfig())


def test_progress_is_logged_as_a_line_in_the_folder_given(tmp_path):
    builder = make_builder()
    builder.log_progress("run", {"pairs": 3})
    for pairs in (3, 4):
        builder.log_progress("run", {"pairs": pairs}, output_dir=str(tmp_path / "logs"))
    lines = (tmp_path / "logs" / "trajectory_builder.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"run_id": "run", "pairs": 3},
        {"run_id": "run", "pairs": 4},
    ]
