"""`credit` outside of protocols: each agent by its own measured reward."""

from __future__ import annotations

import pytest

from etude.algorithms.episodes import UNMEASURED, Collected, ScoredEpisode, Tally, by_agent
from etude.algorithms.grpo import Grpo
from etude.algorithms.samples import branches_of
from etude.core.episode import Event
from etude.core.errors import RequestError
from tests.algorithms.scripted_episodes import conversation, episode


def game(generation: int, *events: Event) -> ScoredEpisode:
    """Two seats with two calls each, in turn."""
    first = conversation("a", f"x{generation}", "b", "y", function="first")
    second = conversation("c", f"z{generation}", "d", "w", start=2, function="second")
    record = episode([*first, *second], generation=generation, events=events)
    return ScoredEpisode(record, 0.0, tuple(branches_of(record, {"*"}, "policy")))


def earned(agent: str, value: float) -> Event:
    return Event("score", 3, value, "", "reward", agent)


def step(after: int, value: float, agent: str | None = None) -> Event:
    return Event("step_reward", after, value, agent=agent)


def test_each_agent_is_compared_with_itself():
    group = [game(n, earned("first", n), earned("second", -n)) for n in range(2)]
    collected = Collected(0, 0, Tally())
    first, second = Grpo(credit="agent").groups([group], collected)
    assert [(sample.agent, sample.reward) for sample in first.units] == [("first", 0), ("first", 1)]
    assert [(sample.agent, sample.reward) for sample in second.units] == [("second", 0), ("second", -1)]
    assert Grpo().advantages(second.units) == [[1.0, 1.0], [-1.0, -1.0]]


def test_an_agent_that_was_not_measured_is_left_out_and_counted():
    tally = Tally()
    groups = by_agent([game(0, earned("first", 1)), game(1, earned("first", 0), earned("second", 1))], tally)
    assert [[part.reward for part in group] for group in groups] == [[1, 0], [1]]
    assert tally.left_out == {UNMEASURED: 1}


def test_with_nothing_measured_it_says_what_to_write():
    with pytest.raises(RequestError, match=r"episode\.score\('reward', value, agent='name'\)"):
        by_agent([game(0, Event("score", 3, 1.0, "", "reward"))])


def test_turns_are_credited_with_their_own_step_rewards():
    """A step reward of an agent's own is not the other's, and one of all is that of both."""
    events = [
        step(1, 0.5, "first"),
        step(3, 0.25, "first"),
        step(3, 8, "second"),
        earned("first", 1),
        earned("second", 0),
    ]
    groups = Grpo(credit="turn", drop_flat_groups=False).groups(
        [[game(0, *events)]], Collected(0, 0, Tally())
    )
    (first,), (second,) = (group.units for group in groups)
    assert [turn.value for turn in first.turns] == [1.75, 1.75]
    assert [turn.value for turn in second.turns] == [8, 8]
