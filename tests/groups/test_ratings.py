"""Bradley-Terry ratings, against a table worked out by hand and a naive climb of the likelihood."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.groups.opponents import bradley_terry, win_probability


def naive(games):
    """Log-strengths by plain gradient ascent on the likelihood, the prior's two games of each included."""
    players = sorted({player for pair in games for player in pair})
    logs = dict.fromkeys(players, 0.0)
    for _ in range(20_000):
        slope = {player: 1.0 - 2.0 / (1.0 + math.exp(-logs[player])) for player in players}
        for (first, second), (count, won) in games.items():
            expected = count / (1.0 + math.exp(logs[second] - logs[first]))
            slope[first] += won - expected
            slope[second] -= won - expected
        for player in players:
            logs[player] += 0.02 * slope[player]
    return {player: 400.0 * value / math.log(10.0) for player, value in logs.items()}


def test_two_players_are_as_worked_out_by_hand():
    # 9 of 10 won. By symmetry the strengths are p and 1/p, and 9 + 1 = 2 p / (p + 1) + 10 p² / (p² + 1)
    # has the root p = 2.45668: 800 · log10 p = 312.28.
    assert bradley_terry({(1, 0): (10, 9)}, anchor=0) == {0: 0.0, 1: pytest.approx(312.28, abs=0.01)}


@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=3, max_size=3))
def test_they_are_where_a_naive_climb_ends(rows):
    pairs = [(0, 1), (1, 2), (2, 0)]
    games = {pair: (count, count * share) for pair, (count, share) in zip(pairs, rows, strict=True)}
    wanted = naive(games)
    assert bradley_terry(games) == pytest.approx(wanted, abs=0.5)


def test_who_wins_everything_has_a_finite_rating_and_one_never_met_has_none():
    ratings = bradley_terry({(2, 1): (50, 50), (3, 3): (9, 9)}, anchor=1)
    assert 0 < ratings[2] < 2000
    assert ratings.keys() == {1, 2}
    assert bradley_terry({}) == {}


def test_elo_says_who_wins():
    assert win_probability(100, 100) == 0.5
    assert win_probability(400, 0) == pytest.approx(10 / 11)
