"""Ratings of players from the results of their games: the Bradley-Terry model on Elo's scale."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

Games: TypeAlias = Mapping[tuple[int, int], tuple[float, float]]
"""By two players: how many games they played, and the points of the first: 1 for a win, 0.5 for a draw."""

_PRIOR = 2.0
"""Games, half of them won, that each player has in addition against one of strength 1."""
_ROUNDS, _CLOSE = 10_000, 1e-10


def bradley_terry(games: Games, anchor: int | None = None) -> dict[int, float]:
    """The rating of each player who has played another; that of `anchor` is 0, if it is one of them.

    Player i beats j with the probability p_i / (p_i + p_j) (Bradley and Terry, 1952), where a draw counts as
    half a win. The strengths are found by p_i <- W_i / Σ_j n_ij / (p_i + p_j), which never lowers the
    likelihood (Hunter, 2004, equation 3). The prior's games keep the strengths of those finite who won all of
    theirs, or none. Ratings are Elo's: 400 · log10 p_i, so that 400 more mean odds of ten to one.
    """
    points: defaultdict[int, float] = defaultdict(float)
    met: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (first, second), (count, won) in games.items():
        if first == second:
            continue
        points[first] += won
        points[second] += count - won
        met[first][second] += count
        met[second][first] += count
    strength = dict.fromkeys(sorted(met), 1.0)
    for _ in range(_ROUNDS):
        after = {
            player: (points[player] + _PRIOR / 2)
            / (
                _PRIOR / (strength[player] + 1.0)
                + sum(count / (strength[player] + strength[other]) for other, count in met[player].items())
            )
            for player in strength
        }
        moved = max((abs(math.log(after[player] / strength[player])) for player in strength), default=0.0)
        strength = after
        if moved < _CLOSE:
            break
    zero = strength.get(anchor, 1.0) if anchor is not None else 1.0
    return {player: 400.0 * math.log10(value / zero) for player, value in strength.items()}


def win_probability(rating: float, other: float) -> float:
    """The probability that a player with a rating beats another, by Elo's formula."""
    return 1.0 / (1.0 + math.pow(10.0, (other - rating) / 400.0))
