"""Votes: how the decisions of several agents become one verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Ballots: TypeAlias = Mapping[str, float | None]
"""The latest decision of every agent that has a turn to decide in, from -1 to 1; None before its first."""

Vote: TypeAlias = Callable[[Ballots], float | None]
"""The verdict of the ballots, in [-1, 1], or None while there is none. A pure function."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Accept, or reject, with this many ballots for it and fewer against it. 0 is a ballot for neither."""

    votes: int

    def __call__(self, ballots: Ballots) -> float | None:
        """1, -1, or None."""
        accept, reject = _sides(ballots)
        if max(accept, reject) < self.votes or accept == reject:
            return None
        return 1.0 if accept > reject else -1.0


def majority(ballots: Ballots) -> float | None:
    """Accept (1) or reject (-1) with more than half of all voters for it, cast or not; otherwise None."""
    return AtLeast(len(ballots) // 2 + 1)(ballots)


def unanimity(ballots: Ballots) -> float | None:
    """Accept (1) or reject (-1) with all voters for it; otherwise None."""
    return AtLeast(len(ballots))(ballots)


def mean_vote(ballots: Ballots) -> float | None:
    """The mean of all ballots, when every voter has cast one; None before that."""
    cast = [ballot for ballot in ballots.values() if ballot is not None]
    return math.fsum(cast) / len(cast) if cast and len(cast) == len(ballots) else None


def _sides(ballots: Ballots) -> tuple[int, int]:
    cast = [ballot for ballot in ballots.values() if ballot is not None]
    return sum(ballot > 0 for ballot in cast), sum(ballot < 0 for ballot in cast)
