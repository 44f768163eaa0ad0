"""Behaviour that the shipped builders share: answers that were cut off, and new samples."""

import asyncio
import json
from dataclasses import replace

import pytest

from etude.algorithms.algorithm import make_algorithm, read_groups
from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.algorithms.plays import find_choices
from etude.algorithms.samples import CUT_OFF, Tally
from etude.config.finetuning import FinetuneConfig, RewardFunctionConfig
from etude.core.episode import Event
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem, EvaluationRunOutput
from tests.algorithms.scripted_episodes import call, conversation, episode
from tests.support import without_times
from tests.training import Interrupted, Run, examples


def evaluation(*episodes_and_scores, evaluator="correct"):
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


def open_builder(name, **options):
    builder = CollectingBuilder(make_algorithm(name, options))
    builder.algorithm.check()
    reward = RewardFunctionConfig(name="correct")
    builder.run_config = FinetuneConfig(reward_function=reward, target_model="policy")
    return builder


async def finish(builder, output):
    collected = asyncio.get_running_loop().create_future()
    collected.set_result(output)
    builder.evaluation_runs["run"] = collected
    return await builder.finalize("run", {"epoch": 0})


async def test_groups_are_by_example_in_the_order_of_the_examples():
    output = evaluation(*siblings(1.0, 0.0, example="b"), *siblings(0.0, 1.0, example="a"))
    collection = await finish(open_builder("grpo"), output)
    assert [[one.metadata["id"] for one in group] for group in collection.trajectories] == [
        ["b"] * 2,
        ["a"] * 2,
    ]
    assert (collection.run_id, collection.method) == ("run", "grpo")


async def test_every_trajectory_knows_the_rewards_of_its_whole_group():
    collection = await finish(open_builder("grpo"), evaluation(*siblings(1.0, 0.5, None)))
    assert [one.group_rewards for one in collection.trajectories[0]] == [[1.0, 0.5]] * 2


async def test_what_has_no_reward_is_left_out_and_counted():
    builder = open_builder("grpo")
    assert len(await finish(builder, evaluation(*siblings(1.0, None, float("nan"), 0.0)))) == 2
    facts = builder.facts("run")
    assert (facts["episodes"], facts["unscored"], facts["rewards"]) == (4, 2, [1.0, 0.0])
    assert builder.facts("another run") == {}


async def test_episodes_without_a_targeted_call_are_left_out_and_counted():
    builder = open_builder("grpo")
    output = evaluation(*siblings(1.0, 0.0), *siblings(1.0, example="other", function="judge"))
    assert len(await finish(builder, output)) == 2
    assert builder.facts("run")["untargeted"] == 1


async def test_a_reward_function_that_did_not_run_is_named_with_those_that_did():
    with pytest.raises(RequestError, match=r"'correct' .*\(style\).*'finetuning\.reward_function\.name'"):
        await finish(open_builder("grpo"), evaluation(*siblings(1.0), evaluator="style"))


async def test_a_builder_needs_a_reward_function():
    with pytest.raises(RequestError, match=r"finetuning\.reward_function\.name"):
        await CollectingBuilder(Grpo()).initialize(FinetuneConfig())


ASK = {"role": "user", "content": "q"}


def cut(*calls):
    """The calls with their answers cut off."""
    return [replace(one, completion=replace(one.completion, finish_reason="length")) for one in calls]


def make_siblings(*rewards_and_cuts):
    """Siblings of one turn each: `(reward, whether the answer was cut off)`."""
    rows = []
    for generation, (reward, is_cut) in enumerate(rewards_and_cuts):
        calls = conversation("q", f"a{generation}")
        rows.append((episode(cut(*calls) if is_cut else calls, generation=generation), reward))
    return evaluation(*rows)


async def collect(name, output, **options):
    """The units that are trained on, as the learner takes them, and the facts of the collection."""
    builder = open_builder(name, **options)
    collection = await finish(builder, output)
    algorithm = builder.algorithm.objective()
    return algorithm.units(read_groups(collection.groups, algorithm)), builder.facts("run")


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp"])
async def test_masked_answers_have_no_weight_and_count_in_the_groups_mean(name):
    output = make_siblings((0.0, True), (1.0, False), (0.5, False))
    plain, _ = await collect(name, output)
    units, _ = await collect(name, output, cut_off="mask")
    assert [unit[0].advantages for unit in units] == [unit[0].advantages for unit in plain]
    assert not any(units[0][0].loss_weights)
    assert [unit[0].loss_weights for unit in units[1:]] == [unit[0].loss_weights for unit in plain[1:]]


async def test_a_penalty_is_taken_from_the_reward_and_not_from_the_one_that_is_reported():
    output = make_siblings((1.0, True), (1.0, False))
    units, facts = await collect("rloo", output, cut_off_penalty=0.4)
    assert [unit[0].gains[-1] for unit in units] == [pytest.approx(-0.4), pytest.approx(0.4)]
    assert facts["rewards"] == [1.0, 1.0]
    assert facts["reward_groups"] == {"compared": 1, "flat": 0}
    untouched, facts = await collect("rloo", output)
    assert not untouched and facts["reward_groups"]["flat"] == 1


@pytest.mark.parametrize(
    ("name", "kept", "count"), [("dpo", [["1", "2"]], 2), ("supervised", [["1"], ["2"]], 1)]
)
async def test_a_pair_or_a_demonstration_that_was_cut_off_is_left_out_when_masked(name, kept, count):
    output = make_siblings((0.0, True), (1.0, False), (0.5, False))
    units, facts = await collect(name, output, cut_off="mask")
    assert [[chr(sample.ids[-2]) for sample in unit] for unit in units] == kept
    assert facts["left_out"] == {CUT_OFF: count}


def test_answers_that_are_compared_within_an_episode_pay_too():
    calls = [
        call(index, [ASK], {"role": "assistant", "content": reply}, "<q>", f"{reply}.")
        for index, reply in enumerate("abc")
    ]
    # The last reward comes after the call of another model.
    events = [Event("step_reward", index, float(min(index, 2))) for index in (0, 1, 3)]
    judged = call(3, [ASK], {"role": "assistant", "content": "good"}, None, None, model="judge")
    record = episode([calls[0], calls[1], *cut(calls[2]), judged], events=events)
    made = open_builder("dpo", compare="turns", cut_off_penalty=5.0).score_episode(record, 3.0, None, Tally())
    assert made is not None and made.reward == -2.0
    [(samples, _)] = find_choices(made)
    assert [sample.reward for sample in samples] == [0.0, 1.0, -3.0]
    tally = Tally()
    pairs = Dpo(compare="turns").groups([[made]], tally)
    assert Dpo(compare="turns").find_comparable(pairs) == [True] and not tally.left_out


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run")
    made.examples = examples(8)
    return made


def easy(names):
    """Everybody earns the same on these examples; on the others it depends on the answer."""

    def correct(example, output):
        return 1.0 if example.id in names else float(output == "yes")

    return correct


def use(run, limit):
    algorithm = Grpo(num_generations=4, examples_per_epoch=3, replace_flat_groups=limit, entropy_bonus=0.1)
    run.builder = CollectingBuilder(algorithm)
    return run


def lines(run):
    return [json.loads(line) for line in (run.path / "training_metrics.jsonl").read_text().splitlines()]


async def test_a_resumed_run_has_the_same_replacements(run, tmp_path):
    names = {example.id for example in run.examples}
    (tmp_path / "other").mkdir()
    whole = use(Run(tmp_path / "other" / "run"), 4)
    whole.examples, whole.evaluator = run.examples, easy(names)
    await whole.start(num_epochs=1)
    run.evaluator = easy(names)
    seen = []

    def stop(episode):
        seen.append(episode)
        if len(seen) == 20:
            raise Interrupted

    run.watcher.episode_finished = stop
    with pytest.raises(Interrupted):
        await use(run, 4).start(num_epochs=1)
    again = use(run.restart(), 4)
    again.evaluator = easy(names)
    await again.start(num_epochs=1)
    assert len(run.engine.requests) + len(again.engine.requests) == len(whole.engine.requests)
    assert without_times(lines(run)) == without_times(lines(whole))
