"""Answers that the limit of tokens cut off, in every algorithm that collects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etude.algorithms.algorithm import algorithm_of, groups_of
from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.episodes import Tally, choices_of
from etude.algorithms.samples import CUT_OFF_PAIR, CUT_OFF_SAMPLE
from etude.backends.openai_api import supervised_row
from etude.config.finetuning import FinetuneConfig, RewardFunctionConfig
from etude.core.episode import Event
from tests.algorithms.scripted_episodes import call, conversation, episode
from tests.algorithms.test_collecting import evaluated, finish

COMPARING = ("grpo", "rloo", "reinforce_pp", "dpo", "expert_iteration")
ASK = {"role": "user", "content": "q"}


def cut(*calls):
    """The calls with their answers cut off."""
    return [replace(one, completion=replace(one.completion, finish_reason="length")) for one in calls]


def played(*rewards_and_cuts):
    """Siblings of one turn each: `(reward, whether the answer was cut off)`."""
    rows = []
    for generation, (reward, is_cut) in enumerate(rewards_and_cuts):
        calls = conversation("q", f"a{generation}")
        rows.append((episode(cut(*calls) if is_cut else calls, generation=generation), reward))
    return evaluated(*rows)


def builder_of(name, **options):
    builder = CollectingBuilder(algorithm_of(name, options))
    builder.algorithm.check()
    reward = RewardFunctionConfig(name="correct")
    builder.run_config = FinetuneConfig(reward_function=reward, target_model="policy")
    return builder


async def made(name, output, **options):
    """The units that are trained on, as the learner takes them, and the facts of the collection."""
    builder = builder_of(name, **options)
    collection = await finish(builder, output)
    algorithm = algorithm_of(collection.method, collection.options)
    groups = groups_of(collection, algorithm)
    return algorithm.units(groups)[0], builder.facts("run")


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp"])
async def test_masked_answers_have_no_weight_and_count_in_the_groups_mean(name):
    output = played((0.0, True), (1.0, False), (0.5, False))
    plain, _ = await made(name, output)
    units, _ = await made(name, output, cut_off="mask")
    assert [unit[0].advantages for unit in units] == [unit[0].advantages for unit in plain]
    assert not any(units[0][0].loss_weights)
    assert [unit[0].loss_weights for unit in units[1:]] == [unit[0].loss_weights for unit in plain[1:]]


async def test_a_penalty_is_taken_from_the_reward_and_not_from_the_one_that_is_reported():
    output = played((1.0, True), (1.0, False))
    units, facts = await made("rloo", output, cut_off_penalty=0.4)
    assert [unit[0].gains[-1] for unit in units] == [pytest.approx(-0.4), pytest.approx(0.4)]
    assert facts["rewards"] == [1.0, 1.0]
    assert facts["reward_groups"] == {"compared": 1, "flat": 0}
    untouched, facts = await made("rloo", output)
    assert not untouched and facts["reward_groups"]["flat"] == 1


async def test_a_pair_with_a_side_that_was_cut_off_is_left_out_when_masked():
    output = played((0.0, True), (1.0, False), (0.5, False))
    units, facts = await made("dpo", output, cut_off="mask")
    assert [[chr(side.ids[-2]) for side in pair] for pair in units] == [["1", "2"]]
    assert facts["left_out"] == {CUT_OFF_PAIR: 2}


async def test_what_is_imitated_keeps_the_other_answers_and_has_the_cut_one_as_context():
    first, second, third = conversation("q", "one", "r", "two", "s", "three")
    mixed = episode([first, *cut(second), third])
    ends = episode([first, second, *cut(third)], generation=1)
    alone = episode(cut(first), generation=2)
    output = evaluated((mixed, 1.0), (ends, 1.0), (alone, 1.0))
    units, facts = await made("supervised", output, cut_off="mask")
    texts = ["".join(map(chr, sample.ids)) for [sample] in units]
    assert texts == ["<q>one.<r>two.<s>three.", "<q>one.<r>two."]
    trained = ["".join(chr(t) for t, own in zip(s.ids, s.mask, strict=True) if own) for [s] in units]
    assert trained == ["one.three.", "one.two."]
    assert facts["left_out"] == {CUT_OFF_SAMPLE: 1}
    collection = await finish(builder_of("supervised", cut_off="mask"), output)
    weights = [
        [message.get("weight") for message in supervised_row(one)["messages"] if message["role"] != "user"]
        for one in collection.trajectories[0]
    ]
    assert weights == [[None, 0, None], [None, None]]


def test_answers_that_are_compared_within_an_episode_pay_too_and_can_be_left_out():
    calls = [
        call(index, [ASK], {"role": "assistant", "content": reply}, "<q>", f"{reply}.")
        for index, reply in enumerate("abc")
    ]
    events = [Event("step_reward", index, float(index)) for index in range(3)]
    record = episode([calls[0], calls[1], *cut(calls[2])], events=events)
    scored = builder_of("dpo", compare="turns", cut_off_penalty=5.0).scored(record, 3.0, None, Tally())
    assert scored is not None and scored.reward == -2.0
    [choice] = choices_of(scored)
    assert [candidate.value for candidate in choice.candidates] == [0.0, 1.0, -3.0]
    [choice] = choices_of(scored, complete=True)
    assert [candidate.value for candidate in choice.candidates] == [0.0, 1.0]
