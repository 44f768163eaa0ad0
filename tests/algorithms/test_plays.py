"""Plays of protocols: which answers belong to whom, what each earned, and the pairs of answers of MALT."""

import pytest

from etude.algorithms import dpo
from etude.algorithms.dpo import Dpo, Malt
from etude.algorithms.grpo import Grpo
from etude.algorithms.plays import BRANCHED, answers_of_group, turn_returns
from etude.algorithms.samples import Tally, read_tree, without_retries
from etude.protocols import adp, nip
from tests.algorithms.scripted_episodes import agent_part, play_out, scored_play

ACCEPT, REJECT = "Decision: accept", "Decision: reject"


async def test_an_answer_that_was_asked_for_again_is_not_trained_on(tmp_path):
    record = await play_out(tmp_path, adp(), ["proof", "well", ACCEPT], retries=1)
    assert len(record.calls) == 3
    assert [call.index for call in without_retries(record).calls] == [0, 2]
    assert [call.index for call in agent_part("verifier", record)[0].calls] == [2]


async def test_an_answer_earns_what_came_after_it(tmp_path):
    protocol = nip(max_message_rounds=5, verifier_no_guess_reward=-0.1)
    record = await play_out(tmp_path, protocol, ["one?", "so", "two?", "so", ACCEPT])
    tree = read_tree(record)
    (verifier,), (prover,) = (agent_part(agent, record) for agent in ("verifier", "prover"))
    assert turn_returns(verifier.calls, tree, "verifier", 1.0) == pytest.approx({0: 0.8, 2: 0.9, 4: 1.0})
    assert turn_returns(verifier.calls, tree, "verifier", 0.5) == pytest.approx({0: 0.1, 2: 0.4, 4: 1.0})
    assert turn_returns(prover.calls, tree, "prover", 1.0) == pytest.approx({1: 1.0, 3: 1.0})
    values = tree.values("verifier")
    own = {node.call: values[node.id] for node in tree.nodes if node.agent == "verifier"}
    assert turn_returns(verifier.calls, tree, "verifier", 1.0) == pytest.approx(own)


async def test_turn_credit_gives_every_answer_its_own_advantage(tmp_path):
    protocol = nip(max_message_rounds=5, verifier_no_guess_reward=-0.1)
    early = await play_out(tmp_path, protocol, ["one?", "so", ACCEPT])
    late = await play_out(
        tmp_path, protocol, ["one?", "so", "two?", "so", REJECT], generation=1, id="train/1/e/1"
    )
    group = answers_of_group(agent_part("verifier", early, late), 1.0, Tally())
    assert group[0].returns == pytest.approx([0.9, 1.0])
    assert group[1].returns == pytest.approx([-1.2, -1.1, -1.0])
    ((first,), (second,)) = Grpo(advantage_scale="none").units([group])
    assert sorted(set(first.advantages)) == pytest.approx([0.0, 1.05])
    assert sorted(set(second.advantages)) == pytest.approx([-1.05, 0.0])


async def test_turn_credit_leaves_out_a_play_that_branches(tmp_path):
    record, tally = await play_out(tmp_path, adp(), ["good", "bad", ACCEPT, REJECT], widths=[2, 1]), Tally()
    assert not any(group.units for group in Grpo(credit="turn").groups([[scored_play(record, 0.5)]], tally))
    assert tally.left_out == {BRANCHED: 4}


def preferences(part, tally=None, **config):
    pairs = Dpo(compare="turns", **config).samples(part, tally or Tally())
    return [tuple(one.messages[-1]["content"] for one in pair.samples) for pair in pairs]


async def test_dpo_pairs_the_answers_to_one_prompt(tmp_path):
    answers = ["a", "b", "c", *[ACCEPT] * 3, ACCEPT, REJECT, REJECT, *[REJECT] * 3]
    record = await play_out(tmp_path, adp(), answers, widths=3)
    prover, tally = agent_part("prover", record), Tally()
    assert preferences(prover, tally) == [("a", "c"), ("a", "b"), ("b", "c")]
    assert preferences(prover, min_reward_diff=0.5) == [("a", "c"), ("a", "b")]
    assert preferences(prover, tally, max_pairs_per_group=1) == [("a", "c")]
    assert tally.left_out == {dpo.OVER_LIMIT: 2}


GOOD, BAD = "a proof", "no proof"


def rows(part, tally=None, **config):
    """The pairs as (chosen, rejected, difference)."""
    pairs = Malt(**config).samples(part, tally or Tally())
    return [(*(one.messages[-1]["content"] for one in pair.samples), pair.reward) for pair in pairs]


@pytest.fixture
async def one_sided(tmp_path):
    """The true claim is accepted half of the time after a proof, and never without one."""
    return await play_out(tmp_path, adp(), [GOOD, BAD, ACCEPT, REJECT, REJECT, REJECT], widths=2)


async def test_an_answer_that_is_worth_the_mid_point_is_preferred_to_one_below_it(one_sided):
    tree = read_tree(one_sided)
    assert [tree.value(node, "prover") for node in tree.children()] == [0.5, 0.0]
    assert rows(agent_part("prover", one_sided)) == [(GOOD, BAD, 0.5)]


async def test_each_agent_is_judged_by_its_own_payoff(one_sided):
    tally = Tally()
    assert rows(agent_part("verifier", one_sided), tally) == [(ACCEPT, REJECT, 2.0)]
    # After no proof both answers were wrong, and neither is better.
    assert tally.left_out == {dpo.NO_PAIR: 1}


async def test_an_interval_is_a_share_of_what_can_be_earned(one_sided):
    prover = agent_part("prover", one_sided)
    assert rows(prover, interval=0.5) == []
    assert rows(prover, interval=0.4) == [(GOOD, BAD, 0.5)]


async def test_early_answers_count_as_much_as_late_ones(tmp_path):
    # The first question leads to an end at once, the second branches on; no end is counted twice.
    def answer(request):
        said = [message["content"] for message in request.messages]
        if said[0].startswith("You are prover"):
            return "so"
        if len(said) == 2:
            return ACCEPT if next(first) else "tell me"
        return REJECT

    first = iter([True, False])
    record = await play_out(tmp_path, nip(max_message_rounds=3), answer, widths=2)
    (pair,) = Malt().samples(agent_part("verifier", record), Tally())
    assert (pair.chosen.reward, pair.rejected.reward) == (1.0, -1.0)
    assert read_tree(record).value(None, "verifier") == 0.0
