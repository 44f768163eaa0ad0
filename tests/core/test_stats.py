"""Intervals: within their bounds, as wide as they should be, Wilson's where meant; and distributions."""

import math
import random
from collections.abc import Callable
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.stats import Distribution, estimate, estimate_difference, shared_bounds, shown_mean
from etude.loop.metrics import reward_metrics
from etude.show.progress import LineProgress
from etude.store.figures import summarize
from tests.show.histories import History, epoch, validation
from tests.support import one_quick

unit = st.floats(0, 1)


@given(st.lists(unit, min_size=1, max_size=40))
def test_the_interval_of_bounded_values_is_bounded_and_holds_the_mean(values):
    found = estimate(values)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert found.n == len(values)
    assert found.low < found.high, "a few values never make it certain"


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=20))
def test_any_scores_have_an_estimate(values):
    found = estimate(values)
    assert min(values) <= found.mean <= max(values)
    assert found.low <= found.mean <= found.high


@given(st.floats(-50, 50), st.floats(0.1, 50), st.lists(unit, min_size=1, max_size=20))
def test_the_interval_of_values_with_declared_bounds_is_within_them(low, width, shares):
    bounds = low, low + width
    values = [min(low + share * width, bounds[1]) for share in shares]
    found = estimate(values, bounds)
    assert bounds[0] <= found.low <= found.mean <= found.high <= bounds[1]
    assert found.low < found.high, "equal values, and one alone, have an interval too"
    apart = estimate_difference(values, values[::-1], bounds)
    assert bounds[0] - bounds[1] <= apart.low <= apart.mean <= apart.high <= bounds[1] - bounds[0]


def test_rewards_of_minus_one_to_one_have_an_interval_within():
    """Of a protocol's payoffs, whether its bounds were declared or are seen."""
    for bounds in (None, (-1.0, 1.0)):
        lost = estimate([-1.0] * 16, bounds)
        assert (lost.low, lost.mean) == (-1.0, -1.0)
        assert -0.7 < lost.high < -0.5, "as zeros of 16: 0 to 0.194"
        assert estimate([1.0] * 7 + [-1.0], bounds).high < 1.0
    few = estimate([-1.0, 1.0, 1.0], (-2.0, 2.0))
    assert -2.0 <= few.low < few.high <= 2.0
    assert estimate([0.5] * 8, (-1.0, 1.0)).low < estimate([0.5] * 8, (0.0, 1.0)).low, (
        "what is declared counts"
    )


def test_a_bound_on_one_side_cuts_the_interval_off_there():
    found = estimate([1.0, 1.0, 9.0], (1.0, math.inf))
    assert found.low == 1.0 and found.high > 9.0


def test_declared_bounds_hold_for_all_values_or_for_none():
    assert shared_bounds([(0, 1), (-1, 0.5), (0, 1)]) == (-1, 1)
    assert shared_bounds([(0, 1), None]) is None
    assert shared_bounds([]) is None


def test_zeros_and_ones_have_wilsons_interval():
    """Brown, Cai and DasGupta (2001) and Newcombe (1998, method 3): 81 of 263 is 0.2553 to 0.3662."""
    found = estimate([1.0] * 81 + [0.0] * 182)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    none = estimate([0.0] * 20)
    assert (none.low, none.high) == pytest.approx((0.0, 0.1611), abs=5e-5)


DRAWS: dict[str, tuple[Callable[[random.Random], float], float]] = {
    "right or wrong, hard": (lambda r: float(r.random() < 0.1), 0.1),
    "right or wrong, even": (lambda r: float(r.random() < 0.5), 0.5),
    "mostly nothing": (lambda r: r.random() if r.random() < 0.3 else 0.0, 0.15),
    "all or nothing, nearly": (lambda r: r.betavariate(0.3, 0.3), 0.5),
    "mean of four": (lambda r: sum(r.random() < 0.9 for _ in range(4)) / 4, 0.9),
    "narrow": (lambda r: r.betavariate(50, 50), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("n", one_quick(10, 50))
def test_the_interval_holds_the_true_mean_as_often_as_it_says(name, n):
    draw, mean = DRAWS[name]
    random_ = random.Random(n)
    found = [estimate([draw(random_) for _ in range(n)]) for _ in range(1000)]
    assert sum(one.low <= mean <= one.high for one in found) / 1000 >= 0.92


@pytest.mark.parametrize("n", [3, 10, 50])
def test_unbounded_values_have_students_interval(n):
    random_ = random.Random(n)
    found = [estimate([random_.gauss(5, 3) for _ in range(n)]) for _ in range(1000)]
    assert 0.93 <= sum(one.low <= 5 <= one.high for one in found) / 1000 <= 0.97


@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize("n", [20, 60])
def test_the_interval_of_a_difference_holds_the_true_one_as_often_as_it_says(share, n):
    """Both runs are right or wrong about an example, mostly alike; the second is right a bit more often."""
    random_ = random.Random(n)

    def pair() -> tuple[float, float]:
        old = float(random_.random() < 0.5)
        changed = random_.random() < share
        return old, (float(random_.random() < 0.8) if changed else old)

    held = 0
    for _ in range(1000):
        pairs = [pair() for _ in range(n)]
        found = estimate_difference([old for old, _ in pairs], [new for _, new in pairs])
        held += found.low <= 0.3 * share <= found.high
    assert held / 1000 >= 0.92


def test_what_one_value_cannot_tell_is_not_told():
    assert (estimate([7.0]).low, estimate([7.0]).high) == (-math.inf, math.inf)
    assert math.isinf(estimate([7.0] * 8).high), "equal values tell nothing of how far they spread"
    assert str(estimate([7.0])) == "7.000 n=1"
    one = estimate([0.5])
    assert one.low < 0.1 and one.high > 0.9


def test_numbers_as_they_are_shown():
    assert shown_mean(0.5, 0.25, 0.75) == "0.500 [0.250, 0.750]"
    assert shown_mean(0.5, -0.25, 0.75, sign="+") == "+0.500 [-0.250, +0.750]"
    assert shown_mean(0.5, None, None) == "0.500"
    assert shown_mean(1e308, None, None) == "1e+308"


PARTIAL = [0.2] * 41 + [0.0] * 20 + [0.1] * 3


def test_the_best_reward_its_share_and_the_counts_are_told():
    found = Distribution.build(PARTIAL)
    assert (found.n, found.best, found.best_count, found.full) == (64, 0.2, 41, 1.0)
    assert str(found) == "best 0.2 (41 of 64, none has 1)"
    assert found.shown_bars() == "20 × 0, 3 × 0.1, 41 × 0.2"
    assert str(Distribution.build([0.0, 1.0])) == "best 1 (1 of 2)"
    assert str(Distribution.build([0.0, 7.0])) == "best 7 (1 of 2)", "nobody knows how much there is"
    assert str(Distribution.build([0.0, 7.0], (0.0, 10.0))) == "best 7 (1 of 2, none has 10)"


def test_many_values_are_counted_by_ranges():
    found = Distribution.build([number / 100 for number in range(100)])
    assert len(found.bars) == 8 and {bar.number for bar in found.bars} <= {12, 13}
    assert found.shown_bars().startswith("13 × 0 … 0.1237, ")


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=40))
def test_every_reward_is_counted_once(rewards):
    found = Distribution.build(rewards)
    assert sum(bar.number for bar in found.bars) == len(rewards)
    assert Distribution.model_validate(found.model_dump(mode="json")) == found


def test_summary_and_lines_say_that_no_answer_has_the_full_reward():
    metrics = reward_metrics(PARTIAL)
    reward = metrics.pop("avg_reward")
    entries = epoch(0, reward, **metrics), validation(0, reward, **metrics)
    summary = summarize(History(run_id="r", epochs=entries[:1], validations=entries[1:]))
    assert summary.before.distribution == entries[0].distribution
    lines = dict(summary.lines())
    assert lines["distribution before"] == "best 0.2 (41 of 64, none has 1): 20 × 0, 3 × 0.1, 41 × 0.2"
    LineProgress(stream := StringIO()).validated(0, entries[1].metrics)
    assert stream.getvalue().endswith(", best 0.2 (41 of 64, none has 1)\n")
