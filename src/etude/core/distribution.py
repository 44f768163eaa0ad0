"""The distribution of rewards: the best that was earned, how many earned it, and how the others lie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from pydantic import BaseModel

from etude.core.stats import Bounds, bounds_of

_BARS = 8
"""Of rewards with more values than this, each bar is a range."""


class Bar(NamedTuple):
    """How many rewards lie from `low` to `high`; of a single value these are the same."""

    low: float
    high: float
    number: int


class Distribution(BaseModel, frozen=True):
    """How the rewards of an epoch or a validation are distributed."""

    n: int
    best: float
    """The highest reward."""
    best_count: int
    """How many have it."""
    full: float | None
    """The highest reward there can be: the upper bound of the rewards; None where they have none."""
    bars: tuple[Bar, ...]
    """The counts, from the lowest reward to the highest."""

    @classmethod
    def of(cls, rewards: Sequence[float], bounds: Bounds | None = None) -> Self:
        """That of some rewards, at least one, whose evaluator declares these `bounds`."""
        best, full = max(rewards), bounds_of(rewards, bounds)[1]
        return cls(
            n=len(rewards),
            best=best,
            best_count=list(rewards).count(best),
            full=full if math.isfinite(full) else None,
            bars=_bars(rewards),
        )

    @classmethod
    def among(cls, metrics: Mapping[str, Any]) -> Self | None:
        """That of the metrics of an epoch or a validation; None where there was no reward."""
        stored = metrics.get("distribution")
        return None if stored is None else cls.model_validate(stored)

    def share_of(self, reward: float) -> float:
        """The share of the answers that have a reward, if it is the best."""
        return self.best_count / self.n if self.best >= reward else 0.0

    def __str__(self) -> str:
        lacks = self.full is not None and self.best < self.full
        none = f", none has {self.full:g}" if lacks else ""
        return f"best {self.best:.4g} ({self.best_count} of {self.n}{none})"

    def shown_bars(self) -> str:
        """The counts as text: `40 × 0, 24 × 0.2`."""
        return ", ".join(
            f"{number} × {low:.4g}" + ("" if low == high else f" … {high:.4g}")
            for low, high, number in self.bars
            if number
        )


def _bars(rewards: Sequence[float]) -> tuple[Bar, ...]:
    counts, low, high = Counter(rewards), min(rewards), max(rewards)
    if len(counts) <= _BARS:
        return tuple(Bar(value, value, count) for value, count in sorted(counts.items()))
    # Halved, so that the width of any two finite numbers is one.
    width = high / 2 - low / 2
    places = Counter(min(int((reward / 2 - low / 2) / width * _BARS), _BARS - 1) for reward in rewards)
    edges = [low + 2 * width * (place / _BARS) for place in range(_BARS)] + [high]
    return tuple(Bar(edges[place], edges[place + 1], places[place]) for place in range(_BARS))
