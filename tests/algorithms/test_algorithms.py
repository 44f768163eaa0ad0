"""The three algorithms as pure functions from a group to trajectories, what they select, and preferences."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import dpo, imitation
from etude.algorithms.dpo import Dpo, Malt
from etude.algorithms.grpo import Grpo
from etude.algorithms.imitation import ExpertIteration
from etude.algorithms.samples import ScoredEpisode, Tally, make_pair, make_sample, same_prompt, targeted_calls
from etude.core.episode import WORKFLOW, Event, Example
from etude.core.errors import RequestError
from etude.core.sample import to_trajectory
from etude.rollout.phases import examples_for_epoch
from tests.algorithms.scripted_episodes import call, conversation, episode, group, ids, make_scored


def grpo_trajectories(siblings, drop_flat_groups, tally):
    (made,) = Grpo(drop_flat_groups=drop_flat_groups).groups([siblings], tally)
    return [*map(to_trajectory, made.units)]


def pairs(siblings, tally=None, **config):
    found = Dpo(**config).samples(siblings, tally or Tally())
    return [(pair.chosen.reward, pair.rejected.reward) for pair in found]


def test_grpo_takes_every_branch_of_an_episode():
    record = episode(conversation("a", "b") + conversation("x", "y", start=1))
    two = ScoredEpisode(record, 1.0, targeted_calls(record, {WORKFLOW}, None))
    found = grpo_trajectories([two, make_scored(0.0, "a", "c", generation=1)], True, Tally())
    assert [(one.metadata["generation"], one.metadata["branch"]) for one in found] == [(0, 0), (0, 1), (1, 0)]


def test_grpo_keeps_a_group_whose_step_rewards_differ():
    calls = conversation("a", "b")
    siblings = []
    for generation, step in enumerate((0.1, 0.9)):
        record = episode(
            calls, generation=generation, events=[Event("step_reward", after_call=0, value=step)]
        )
        siblings.append(ScoredEpisode(record, 0.0, targeted_calls(record, {WORKFLOW}, None)))
    assert [one.shaped_rewards for one in grpo_trajectories(siblings, True, Tally())] == [[0.1], [0.9]]


def test_dpo_pairs_every_two_episodes_clearest_first():
    assert pairs(group((0.5, "a"), (0.9, "b"), (0.1, "c"))) == [(0.9, 0.1), (0.9, 0.5), (0.5, 0.1)]


def test_dpo_drops_ties_equal_responses_and_small_differences_and_counts_each():
    tally = Tally()
    siblings = group((1.0, "a"), (1.0, "b"), (0.95, "c"), (0.0, "a"))
    assert pairs(siblings, tally, min_reward_diff=0.1) == [(1.0, 0.0), (0.95, 0.0)]
    assert tally.left_out == {dpo.TIE: 1, dpo.TOO_CLOSE: 2, dpo.SAME_RESPONSE: 1}


def test_dpo_never_pairs_episodes_that_began_with_different_prompts():
    tally = Tally()
    assert pairs([make_scored(1.0, "one", "a"), make_scored(0.0, "two", "b", generation=1)], tally) == []
    assert tally.left_out == {dpo.OTHER_PROMPT: 1}


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("learning_rate", 'backend={"_type": "local", "learning_rate": …}'),
        ("num_generation", "'num_generations'?"),
    ],
)
def test_an_option_of_no_algorithm_is_refused_with_where_it_belongs(option: str, told: str):
    with pytest.raises(RequestError, match=f"Grpo .* '{option}'; ") as raised:
        Grpo(**{option: 1})
    assert told in str(raised.value)
    assert Grpo(group=4).num_generations == 4


@pytest.mark.parametrize(
    ("algorithm", "options", "told"),
    [
        (Grpo, {"variant": "x"}, "Grpo: variant: Input should be 'dapo', .*, found 'x'"),
        (Grpo, {"group": 4, "num_generations": 4}, "num_generations and group .*option"),
        (Dpo, {"beta": -1, "credit": 3}, "Dpo: credit: .*, found 3; beta: .* 0, found -1"),
        (Malt, {"interval": "a"}, "Malt: interval: .*number, .*, found 'a'"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_told_with_what_was_found(algorithm, options, told):
    with pytest.raises(RequestError, match=told):
        algorithm(**options)


def imitate(siblings, min_reward=None, best_k=None, tally=None):
    found = ExpertIteration(min_reward=min_reward, best_k=best_k).samples(siblings, tally or Tally())
    return [(one.reward, one.generation) for one in found]


def test_expert_iteration_keeps_what_reaches_the_threshold_best_first():
    tally = Tally()
    assert imitate(group((0.5, "a"), (1.0, "b"), (0.2, "c")), min_reward=0.5, tally=tally) == [
        (1.0, 1),
        (0.5, 0),
    ]
    assert tally.left_out == {imitation.BELOW: 1}


def test_expert_iteration_keeps_the_best_one_by_default_and_nothing_of_a_group_of_equals():
    tally = Tally()
    assert imitate(group((0.0, "a"), (0.5, "b"))) == [(0.5, 1)]
    assert imitate(group((0.0, "a"), (0.0, "b")), tally=tally) == []
    assert tally.left_out == {imitation.NO_BEST: 1}


def choose(size, count, epoch, seed=0):
    dataset = [Example(str(number)) for number in range(size)]
    return [example.id for example in examples_for_epoch(dataset, count, epoch, seed)]


def test_all_examples_in_their_order_when_no_count_is_given_or_it_covers_them():
    assert choose(3, None, 5) == ["0", "1", "2"]
    assert choose(3, 3, 5) == ["0", "1", "2"]
    assert choose(3, 9, 5) == ["0", "1", "2"]


@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 20), st.integers(0, 5))
def test_epochs_have_no_example_twice_and_passes_use_all_examples_equally_often(size, count, epochs, seed):
    used: Counter[str] = Counter({str(number): 0 for number in range(size)})
    for epoch in range(epochs):
        ids = choose(size, count, epoch, seed)
        assert len(ids) == len(set(ids)) == min(count, size)
        used.update(ids)
    assert max(used.values()) - min(used.values()) <= 1


SHARED = [{"role": "user", "content": "q"}]


def branch(calls):
    return make_sample(calls, episode(calls), 0.0)


def preference(chosen, rejected):
    pair = make_pair(chosen, rejected)
    return None if pair is None else to_trajectory(pair).episode[0]


def test_a_pair_parts_where_the_tokens_part():
    item = preference(branch(conversation("q", "abc")), branch(conversation("q", "abd")))
    assert item.prompt_ids == ids("<q>ab")
    assert (item.chosen_ids, item.rejected_ids) == (ids("c."), ids("d."))
    assert item.chosen_mask == (True, True)
    assert item.chosen_logprobs == tuple(-token / 1000 for token in ids("c."))
    assert [message.to_wire() for message in item.prompt] == SHARED
    assert (item.chosen_response, item.rejected_response) == ("abc", "abd")


def test_over_several_turns_the_whole_rest_is_the_response_and_observations_are_masked():
    item = preference(branch(conversation("q", "a", "x", "b")), branch(conversation("q", "a", "y", "c")))
    assert item.prompt_ids == ids("<q>a.<")
    assert item.chosen_ids == ids("x>b.")
    assert item.chosen_mask == (False, False, True, True)
    assert item.chosen_logprobs[:2] == (0.0, 0.0)
    assert item.chosen_response == "[USER]: x\n\n[ASSISTANT]: b"


def test_a_pair_where_nothing_was_sampled_after_the_parting_is_no_preference():
    assert preference(branch(conversation("q", "a")), branch(conversation("q", "a", "more", "b"))) is None


def test_without_token_ids_the_texts_are_the_preference():
    good = branch([call(0, SHARED, {"role": "assistant", "content": "a"}, None, None)])
    bad = branch([call(0, SHARED, {"role": "assistant", "content": "b"}, None, None)])
    item = preference(good, bad)
    assert (item.prompt_ids, item.chosen_ids, item.chosen_mask) == (None, None, None)
    assert (item.chosen_response, item.rejected_response) == ("a", "b")
    assert preference(good, good) is None


def test_prompts_are_the_same_by_tokens_where_they_are_known_and_by_messages_otherwise():
    assert same_prompt(branch(conversation("q", "a")), branch(conversation("q", "b")))
    assert not same_prompt(branch(conversation("q", "a")), branch(conversation("p", "a")))
    unknown = branch([call(0, SHARED, {"role": "assistant", "content": "a"}, None, None)])
    assert same_prompt(unknown, branch(conversation("q", "b")))
    assert not same_prompt(unknown, branch(conversation("p", "b")))
