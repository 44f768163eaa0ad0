"""Advantages of GRPO by hand, named variants, and `credit`."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.algorithm import gradient_fields, read_groups
from etude.algorithms.grpo import Grpo, ReinforcePP, Rloo
from etude.algorithms.plays import UNMEASURED, by_agent
from etude.algorithms.samples import ScoredEpisode, Tally, targeted_calls
from etude.core.episode import Event
from etude.core.errors import RequestError, TrainingError
from etude.core.interfaces import WrongReturnError
from etude.core.sample import Sample, TrajectoryCollection, Turn
from etude.server.job_request import job_algorithm, resolve_hyperparameters
from tests.algorithms.scripted_episodes import conversation, episode
from tests.backends.test_hyperparameters import hyperparameters_for

PLAIN = Grpo(advantage_scale="none")


@pytest.mark.parametrize(
    ("rewards", "scale", "expected"),
    [
        ([0.0, 1.0], "std", [-1.0, 1.0]),
        ([0.0, 0.0, 0.0, 1.0], "none", [-0.25, -0.25, -0.25, 0.75]),
        ([1.0, 2.0, 3.0], "std", [-math.sqrt(1.5), 0.0, math.sqrt(1.5)]),
        ([5.0], "std", [0.0]),
    ],
)
def test_an_advantage_is_the_distance_to_the_groups_mean(rewards, scale, expected):
    assert Grpo(advantage_scale=scale).compare(rewards) == pytest.approx(expected)


rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=8)


@given(rewards, st.floats(-50, 50), st.floats(0.1, 10))
def test_scaled_advantages_do_not_depend_on_the_rewards_unit(group, shift, factor):
    before = Grpo().compare(group)
    after = Grpo().compare([value * factor + shift for value in group])
    if max(group) - min(group) > 1e-3:
        assert after == pytest.approx(before, abs=1e-4)
    assert sum(before) == pytest.approx(0, abs=1e-6)


def sample(reward, *turns, returns=None, **fields):
    """A sample of one context token and some sampled ones for each turn, which is their number or a Turn."""
    ids, mask, made = [], [], []
    for number, turn in enumerate(turns):
        given = turn if isinstance(turn, Turn) else Turn(0, turn)
        start, length = len(ids) + 1, given.stop - given.start
        ids += [7] * (1 + length)
        mask += [False] + [True] * length
        value = None if returns is None else returns[number]
        made.append(replace(given, start=start, stop=start + length, value=value))
    return Sample(tuple(ids), tuple(mask), (0.0,) * len(ids), turns=tuple(made), reward=reward, **fields)


def test_turns_are_compared_with_the_same_turn_of_their_siblings():
    group = [
        sample(0.0, 1, 1, 1, returns=[1.0, 4.0, 9.0]),
        sample(0.0, 1, 1, returns=[3.0, 4.0]),
        sample(0.0, 1, 1, returns=[5.0, 7.0]),
    ]
    assert PLAIN.advantages(group) == [[-2.0, -1.0, 0.0], [0.0, -1.0], [2.0, 2.0]]


ODD = [("compare", None), ("compare", [1.0]), ("advantages", [[], []]), ("needs", {"reference_BT"})]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_an_own_method_that_returns_something_odd_is_named(name, value):
    odd = type("Odd", (Grpo,), {name: lambda self, *_: value, "__module__": __name__})()
    with pytest.raises((WrongReturnError, TrainingError), match=rf"test_grpo\.py:\d+|`{name}`"):
        odd.has_advantage([sample(0.0, 1), sample(1.0, 1)]), odd.needs()


def test_groups_are_scored_on_their_own_and_spread_over_the_sampled_tokens():
    groups = [[sample(1.0, 2), sample(1.0, 1)], [sample(0.0, 1), sample(4.0, 1)], [sample(3.0, 1)]]
    advantages = [unit[0].advantages for unit in PLAIN.units(groups)]
    assert advantages == [(0, 0, 0), (0, 0), (0, -2), (0, 2), (0, 0)]


@pytest.mark.parametrize("variant", ["dapo", "gspo", "cispo"])
def test_the_server_has_the_options_that_the_algorithm_declares(variant):
    job = resolve_hyperparameters("grpo", hyperparameters_for("grpo", variant=variant), 4)
    found = Grpo(variant=variant)
    assert job.items() >= found.model_dump(include={*gradient_fields(Grpo)}).items()
    assert job_algorithm("grpo", job) == found


def test_each_option_of_a_variant_can_be_changed():
    found = Grpo(variant="gspo", clip_high=0.01)
    assert (found.clip_low, found.clip_high, found.ratio) == (3e-4, 0.01, "sequence")
    asked = hyperparameters_for("grpo", variant="gspo", clip_high=0.01, clip_low="auto")
    job = resolve_hyperparameters("grpo", asked, 4)
    assert (job["clip_low"], job["clip_high"], job["ratio"]) == (3e-4, 0.01, "sequence")


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1.0, 2.0, 6.0], [-3.0, -1.5, 4.5]), ([0.5] * 3, [0.0] * 3), ([2.0], [0.0])]
)
def test_rloo_has_the_distance_to_the_mean_of_the_others(rewards, expected):
    assert Rloo().compare(rewards) == pytest.approx(expected)


def test_branches_of_one_episode_count_once():
    group = [sample(1.0, 1, episode="e"), sample(1.0, 1, episode="e"), sample(0.0, 1, episode="f")]
    assert Rloo().advantages(group) == [[1.0], [1.0], [-1.0]]


def batch_advantages(algorithm, *groups):
    return [unit[0].advantages for unit in algorithm.units(groups)]


def test_reinforce_pp_normalises_advantages_over_all_tokens_of_the_batch():
    # Rewards 1 (three tokens) and 0 (one token): mean 3/4, deviation sqrt(3)/4.
    found = batch_advantages(ReinforcePP(), [sample(1.0, 3)], [sample(0.0, 1)])
    assert found[0] == pytest.approx((0, *[1 / math.sqrt(3)] * 3))
    assert found[1] == pytest.approx((0, -math.sqrt(3)))


def test_groups_are_not_compared_with_each_other_where_there_is_a_baseline():
    easy, hard = [sample(1.0, 1), sample(0.9, 1)], [sample(0.1, 1), sample(0.0, 1)]
    plain = batch_advantages(ReinforcePP(), easy, hard)
    based = batch_advantages(ReinforcePP(baseline=True), easy, hard)
    assert plain[1][1] > 0 > plain[2][1]
    assert [values[1] for values in based] == pytest.approx([1.0, -1.0, 1.0, -1.0])


def test_advantages_that_samples_came_with_are_kept():
    group = [sample(1.0, 1, advantages=(0.0, 5.0)), sample(0.0, 1, advantages=(0.0, -3.0))]
    assert batch_advantages(ReinforcePP(), group) == [(0, 5), (0, -3)]


def game(generation: int, *events: Event) -> ScoredEpisode:
    """Two seats with two calls each, in turn."""
    first = conversation("a", f"x{generation}", "b", "y", function="first")
    second = conversation("c", f"z{generation}", "d", "w", start=2, function="second")
    record = episode([*first, *second], generation=generation, events=events)
    return ScoredEpisode(record, 0.0, targeted_calls(record, {"*"}, "policy"))


def payoff(agent: str, value: float) -> Event:
    return Event("score", 3, value, "", "reward", agent)


def step(after: int, value: float, agent: str | None = None) -> Event:
    return Event("step_reward", after, value, agent=agent)


def test_each_agent_is_compared_with_itself():
    group = [game(n, payoff("first", n), payoff("second", -n)) for n in range(2)]
    first, second = Grpo(credit="agent").groups([group], Tally())
    assert [(sample.agent, sample.reward) for sample in first.units] == [("first", 0), ("first", 1)]
    assert [(sample.agent, sample.reward) for sample in second.units] == [("second", 0), ("second", -1)]
    assert [group.rewards for group in (first, second)] == [[0, 1], [0, -1]]
    assert Grpo().advantages(second.units) == [[1.0, 1.0], [-1.0, -1.0]]


def test_an_agent_that_was_not_measured_is_left_out_and_counted():
    tally = Tally()
    groups = by_agent([game(0, payoff("first", 1)), game(1, payoff("first", 0), payoff("second", 1))], tally)
    assert [[part.reward for part in group] for group in groups] == [[1, 0], [1]]
    assert tally.left_out == {UNMEASURED: 1}


def test_with_nothing_measured_it_says_what_to_write():
    with pytest.raises(RequestError, match=r"episode\.score\('reward', value, agent='name'\)"):
        by_agent([game(0, Event("score", 3, 1.0, "", "reward"))])


def test_turns_are_credited_with_their_own_step_rewards():
    """A step reward of an agent's own is not the other's, and one of all is both's."""
    steps = [step(1, 0.5, "first"), step(3, 0.25, "first"), step(3, 8, "second")]
    events = [*steps, payoff("first", 1), payoff("second", 0)]
    groups = Grpo(credit="turn", drop_flat_groups=False).groups([[game(0, *events)]], Tally())
    (first,), (second,) = (group.units for group in groups)
    assert [turn.value for turn in first.turns] == [1.75, 1.75]
    assert [turn.value for turn in second.turns] == [8, 8]


def test_the_branches_of_an_agent_are_one_course_of_turns():
    """With fresh prompts too, later step rewards count for earlier answers."""
    calls = [each for number in range(3) for each in conversation(f"q{number}", "x", start=number)]
    records = [episode(calls, generation=n, events=[step(at, 1.0) for at in range(3)]) for n in range(2)]
    group = [ScoredEpisode(each, 0.0, targeted_calls(each, {"*"}, "policy")) for each in records]
    samples = [sample for scored in group for sample in scored.samples(0.5)]
    assert [turn.value for sample in samples for turn in sample.turns] == [1.75, 1.5, 1.0] * 2
    assert Grpo().advantages(samples) == [[0.0]] * 6


def test_turns_of_interleaved_branches_are_compared_in_the_order_of_their_calls():
    """Here a conversation goes on after a question aside, in one episode; in the other, nothing is asked."""
    whole = conversation("a", "b", "c", "d")
    calls = [whole[0], *conversation("e", "f", start=1), replace(whole[1], index=2)]
    events = [step(at, value) for at, value in ((0, 1.0), (1, 10.0), (2, 100.0))]
    record = episode(calls, events=events)
    long = ScoredEpisode(record, 0.0, targeted_calls(record, {"*"}, "policy")).samples()
    assert [[turn.call for turn in one.turns] for one in long] == [[0, 2], [1]]
    short = [sample(0.0, 1, 1, 1, returns=[0.0, 10.0, 20.0], episode="f")]
    assert PLAIN.advantages([*long, *short]) == [[55.5, 40.0], [50.0], [-55.5, -50.0, -40.0]]


def test_turns_read_from_a_file_have_the_advantages_that_they_had():
    """As in a job of another process: the agents of an episode stay apart."""
    played = [game(n, step(1, 0.5 + n, "first"), step(3, 8.0 * n, "second")) for n in range(2)]
    group = [sample for scored in played for sample in scored.samples()]
    written = TrajectoryCollection(trajectories=[group], run_id="job").model_dump_json()
    (read,) = read_groups(TrajectoryCollection.model_validate_json(written).groups, PLAIN)
    assert PLAIN.advantages(read) == PLAIN.advantages(group)
