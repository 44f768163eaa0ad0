"""MALT: pairs of answers in a play, by what they were worth."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.algorithms import malt
from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.episodes import Collected, Tally, choices_of, tree_of
from etude.algorithms.malt import Malt
from etude.core.edge import trajectory_of
from etude.protocols import adp, mnip, nip
from tests.algorithms.plays import expected_value, part_of, played, scored
from tests.protocols.games import ChanceEngine, example
from tests.support import END

GOOD, BAD = "a proof", "no proof"
ACCEPT, REJECT = "Decision: accept", "Decision: reject"


def malt_trajectories(part, config, tally):
    return [*map(trajectory_of, config.samples(part, tally))]


def rows(part, tally=None, **config):
    """The pairs as (turn, chosen, rejected, difference)."""
    made = malt_trajectories(part, Malt(**config), tally or Tally())
    return [
        (one.metadata["turn"], one.episode[0].chosen_response, one.episode[0].rejected_response, one.reward)
        for one in made
    ]


@pytest.fixture
async def one_sided(tmp_path):
    """The true claim is accepted half of the time after a proof, and never without one."""
    answers = [GOOD, BAD, ACCEPT, REJECT, REJECT, REJECT]
    return await played(tmp_path, adp(), answers, widths=2)


async def test_an_answer_that_is_worth_the_mid_point_is_preferred_to_one_below_it(one_sided):
    tree = tree_of(one_sided)
    assert [tree.value(node, "prover") for node in tree.children()] == [0.5, 0.0]
    assert rows(part_of("prover", one_sided)) == [(0, GOOD, BAD, 0.5)]


async def test_each_agent_is_judged_by_its_own_payoff(one_sided):
    tally = Tally()
    assert rows(part_of("verifier", one_sided), tally) == [(0, ACCEPT, REJECT, 2.0)]
    # After no proof both answers were wrong, and neither is better.
    assert tally.left_out == {malt.NO_PAIR: 1}


async def test_an_interval_is_a_share_of_what_can_be_earned(one_sided):
    prover = part_of("prover", one_sided)
    assert rows(prover, pairs="interval", interval=0.5) == []
    assert rows(prover, pairs="interval", interval=0.4) == [(0, GOOD, BAD, 0.5)]


async def test_a_row_has_the_tokens_and_the_logprobs_that_were_sampled(one_sided):
    (row,) = malt_trajectories(part_of("prover", one_sided), Malt(), Tally())
    item, first, second = row.episode[0], *one_sided.calls[:2]
    assert [message.role for message in item.prompt] == ["system", "user"]
    assert item.prompt[0].content == "You are prover. e"
    # Both were sampled from one prompt, and part with their first token.
    assert item.prompt_ids == first.completion.prompt_ids == second.completion.prompt_ids
    assert item.chosen_ids == (*b"a proof", END)
    assert item.rejected_ids == (*b"no proof", END)
    assert item.chosen_logprobs == first.completion.logprobs
    assert item.rejected_logprobs == second.completion.logprobs
    assert item.chosen_mask == (True,) * len(item.chosen_ids)
    assert row.metadata == {
        "id": "e",
        "episode": "train/1/e/0",
        "turn": 0,
        "agent": "prover",
        "chosen_reward": 0.5,
        "rejected_reward": 0.0,
    }


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
    record = await played(tmp_path, nip(max_message_rounds=3), answer, widths=2)
    (pair,) = malt_trajectories(part_of("verifier", record), Malt(), Tally())
    assert (pair.metadata["chosen_reward"], pair.metadata["rejected_reward"]) == (1.0, -1.0)
    assert tree_of(record).value(None, "verifier") == 0.0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), label=st.integers(0, 1))
async def test_values_are_those_of_listing_every_way_to_the_end(tmp_path_factory, seed, label):
    folder = tmp_path_factory.mktemp("play")
    protocol = mnip(max_message_rounds=3, verifier_no_guess_reward=-0.1)
    record = await played(
        folder, protocol, ChanceEngine(), widths=2, seed=seed, about=example(label), retries=1
    )
    tree = tree_of(record)
    for agent in tree.agents:
        for part in part_of(agent, record):
            for turn in choices_of(part):
                for candidate in turn.candidates:
                    places = [node for node in tree.nodes if node.call == candidate.call.index]
                    values = [expected_value(tree, node, agent) for node in places]
                    assert candidate.value == pytest.approx(sum(values) / len(values))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), rule=st.sampled_from(["sign", "interval"]))
async def test_pairs_share_a_prompt_and_the_better_answer_is_chosen(tmp_path_factory, seed, rule):
    folder = tmp_path_factory.mktemp("play")
    record = await played(folder, mnip(max_message_rounds=3), ChanceEngine(), widths=2, seed=seed)
    calls = {call.completion.prompt_ids for call in record.calls}
    for agent in ("prover0", "prover1", "verifier"):
        config = Malt(pairs=rule, interval=0.1)
        for one in malt_trajectories(part_of(agent, record), config, Tally()):
            item = one.episode[0]
            assert one.metadata["chosen_reward"] > one.metadata["rejected_reward"]
            assert item.chosen_ids != item.rejected_ids
            assert any(item.prompt_ids[: len(prompt)] == prompt for prompt in calls)


async def test_the_first_epochs_can_be_expert_iteration_on_plays_that_do_not_branch(tmp_path):
    algorithm = Malt(initial_expert_iterations=2, num_responses=3, beta=0.3)
    builder = CollectingBuilder(algorithm)
    assert builder.methods == ("supervised", "dpo")
    methods = [algorithm.method_at(epoch)[0] for epoch in range(4)]
    assert methods == ["supervised", "supervised", "dpo", "dpo"]
    assert algorithm.method_at(2)[1]["beta"] == 0.3
    assert [algorithm.widths(epoch) for epoch in range(4)] == [1, 1, 3, 3]
    assert [builder.label_of(epoch) for epoch in range(4)] == ["k1", "k1", "k3", "k3"]
    won = await played(tmp_path, adp(), [GOOD, ACCEPT])
    lost = await played(tmp_path, adp(), [GOOD, REJECT], generation=1, id="train/1/e/1")
    made = algorithm.groups([[scored(won), scored(lost)]], Collected(0, 0, Tally()))
    assert [[one.generation for one in group.units] for group in made] == [[0], [0]]
