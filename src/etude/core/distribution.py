"""The distribution of rewards: the best reward, how many episodes earned it, and the other rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from pydantic import BaseModel

from etude.core.stats import Bounds, all_bounds

_BARS = 8
"""Most bars. With more distinct rewards than this, each bar is a range."""


class Bar(NamedTuple):
    """The number of rewards from `low` to `high`, which are equal for a single value."""

    low: float
    high: float
    number: int


class Distribution(BaseModel, frozen=True):
    """The distribution of the rewards of an epoch or a validation."""

    n: int
    best: float
    best_count: int
    """The number of episodes with the highest reward."""
    full: float | None
    """The highest possible reward: the upper bound of the rewards; None if they have none."""
    bars: tuple[Bar, ...]
    """The counts, from the lowest reward to the highest."""

    @classmethod
    def of(cls, rewards: Sequence[float], bounds: Bounds | None = None) -> Self:
        """Return the distribution of one or more rewards, whose evaluator declares these `bounds`."""
        best, full = max(rewards), all_bounds(rewards, bounds)[1]
        return cls(
            n=len(rewards),
            best=best,
            best_count=list(rewards).count(best),
            full=full if math.isfinite(full) else None,
            bars=_bars(rewards),
        )

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any]) -> Self | None:
        """Return the distribution in the metrics of an epoch or a validation; None if there was no reward."""
        stored = metrics.get("distribution")
        return None if stored is None else cls.model_validate(stored)

    def best_share(self, reward: float) -> float:
        """Return the share of the best answers if they reach this reward, and else 0."""
        return self.best_count / self.n if self.best >= reward else 0.0

    def __str__(self) -> str:
        lacks = self.full is not None and self.best < self.full
        none = f", none has {self.full:g}" if lacks else ""
        return f"best {self.best:.4g} ({self.best_count} of {self.n}{none})"

    def shown_bars(self) -> str:
        """Return the counts as text: `40 × 0, 24 × 0.2`."""
        return ", ".join(
            f"{number} × {low:.4g}" + ("" if low == high else f" … {high:.4g}")
            for low, high, number in self.bars
            if number
        )


def _bars(rewards: Sequence[float]) -> tuple[Bar, ...]:
    counts, low, high = Counter(rewards), min(rewards), max(rewards)
    if len(counts) <= _BARS:
        return tuple(Bar(value, value, count) for value, count in sorted(counts.items()))
    # Halved, so that the width between any two finite numbers is finite.
    width = high / 2 - low / 2
    places = Counter(min(int((reward / 2 - low / 2) / width * _BARS), _BARS - 1) for reward in rewards)
    edges = [low + 2 * width * (place / _BARS) for place in range(_BARS)] + [high]
    return tuple(Bar(edges[place], edges[place + 1], places[place]) for place in range(_BARS))
