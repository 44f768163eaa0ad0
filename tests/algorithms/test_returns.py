"""Discounted returns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.samples import discounted_returns

rewards = st.lists(st.floats(-100, 100), max_size=20)
discounts = st.floats(0, 1)


@pytest.mark.parametrize(
    ("steps", "discount", "returns"),
    [
        ([], 0.5, []),
        ([1.0, 0.0, 4.0], 0.5, [2.0, 2.0, 4.0]),
        ([1.0, 2.0, 3.0], 1.0, [6.0, 5.0, 3.0]),
        ([1.0, 2.0, 3.0], 0.0, [1.0, 2.0, 3.0]),
    ],
)
def test_golden(steps: list[float], discount: float, returns: list[float]) -> None:
    assert discounted_returns(steps, discount) == returns


@given(rewards, discounts)
def test_a_return_is_the_discounted_sum_of_what_follows(steps: list[float], discount: float) -> None:
    expected = [
        sum(discount**later * reward for later, reward in enumerate(steps[start:]))
        for start in range(len(steps))
    ]
    assert discounted_returns(steps, discount) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("discount", [-0.1, 1.1, float("nan")])
def test_a_discount_outside_of_0_and_1_is_refused(discount: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        discounted_returns([1.0], discount)
