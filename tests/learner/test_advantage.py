"""Advantages by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.learner.advantage import group_advantages, turn_advantages


@pytest.mark.parametrize(
    ("rewards", "scale", "expected"),
    [
        ([0.0, 1.0], "std", [-1.0, 1.0]),
        ([0.0, 0.0, 1.0, 1.0], "std", [-1.0, -1.0, 1.0, 1.0]),
        ([0.0, 0.0, 0.0, 1.0], "none", [-0.25, -0.25, -0.25, 0.75]),
        ([1.0, 2.0, 3.0], "std", [-math.sqrt(1.5), 0.0, math.sqrt(1.5)]),
        ([5.0], "std", [0.0]),
        ([5.0], "none", [0.0]),
        ([0.1, 0.1, 0.1], "std", [0.0, 0.0, 0.0]),
        ([], "std", []),
    ],
)
def test_an_advantage_is_the_distance_to_the_groups_mean(rewards, scale, expected):
    assert group_advantages(rewards, scale) == pytest.approx(expected)


def test_rounding_among_equal_rewards_is_not_blown_up():
    equal = [0.1 + 0.2, 0.3, 0.3]
    assert len(set(equal)) == 2
    assert group_advantages(equal) == [0.0, 0.0, 0.0]


rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=8)


@given(rewards, st.floats(-50, 50), st.floats(0.1, 10))
def test_scaled_advantages_do_not_depend_on_the_rewards_unit(group, shift, factor):
    before = group_advantages(group)
    after = group_advantages([value * factor + shift for value in group])
    if max(group) - min(group) > 1e-3:
        assert after == pytest.approx(before, abs=1e-4)
    assert sum(before) == pytest.approx(0, abs=1e-6)


def test_turns_are_compared_with_the_same_turn_of_their_siblings():
    returns = [[1.0, 4.0, 9.0], [3.0, 4.0], [5.0, 7.0]]
    assert turn_advantages(returns, "none") == [[-2.0, -1.0, 0.0], [0.0, -1.0], [2.0, 2.0]]
    assert turn_advantages([[], [1.0]], "std") == [[], [0.0]]
    assert turn_advantages([]) == []
