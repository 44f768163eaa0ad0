"""Means with their 95 % intervals, the distribution of rewards, and figures as text.

All intervals that are printed or stored are made here.

Values within known bounds, and their differences, have Wilson's score interval, generalised to values between
the bounds. An evaluator or a protocol declares the bounds. Without declared bounds, the values decide: if all
lie in [0, 1], or else in [-1, 1], this range counts as their bounds. All other values have Student's t
interval, cut off at a bound that exists on only one side.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Any, NamedTuple, Self, TypeAlias

from pydantic import BaseModel

Bounds: TypeAlias = tuple[float, float]
"""The lowest and the highest possible value; infinite on a side without a bound."""

_PRESUMED: tuple[Bounds, ...] = ((0.0, 1.0), (-1.0, 1.0))
_Z95 = 1.959964
_PRIOR = 2.0
"""Number of prior values, added to the observed ones when their spread is judged."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % confidence interval, which is infinite if the values do not allow one."""

    mean: float
    low: float
    high: float
    n: int
    """The number of values."""

    def __str__(self) -> str:
        return f"{shown_mean(self.mean, self.low, self.high)} n={self.n}"


def shown_mean(mean: float, low: float | None, high: float | None, *, sign: str = "") -> str:
    """Return a mean with its interval as text; without the interval if it is unknown.

    Set `sign` to `+` for numbers that begin with their sign.
    """

    def show(value: float) -> str:
        return f"{value:{sign}.3f}" if abs(value) < 1e6 else f"{value:{sign}.4g}"

    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return show(mean)
    return f"{show(mean)} [{show(low)}, {show(high)}]"


def shared_bounds(declared: Iterable[Sequence[float] | None]) -> Bounds | None:
    """Return the bounds that hold for all values, each with its own bounds; None if one value has none."""
    ends = {None if bounds is None else (bounds[0], bounds[1]) for bounds in declared}
    known = [bounds for bounds in ends if bounds is not None]
    if not known or len(known) < len(ends):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def all_bounds(values: Iterable[float], declared: Bounds | None = None) -> Bounds:
    """Return the `declared` bounds, or else the bounds that the values suggest."""
    if declared is not None:
        return declared
    known = list(values)
    within = (bounds for bounds in _PRESUMED if all(bounds[0] <= value <= bounds[1] for value in known))
    return next(within, (-math.inf, math.inf))


def estimate(values: Sequence[float], bounds: Bounds | None = None) -> Estimate:
    """Return the mean and 95 % interval of independent values. Raises ValueError for no values.

    `bounds` are the declared bounds. The interval is infinite if the values do not show how far they spread.
    """
    mean, n = _mean(values), len(values)
    low, high = all_bounds(values, bounds)
    if math.isfinite(high - low):
        return _wilson(mean, pstdev(values, mean) ** 2 / n, n, low, high)
    return _student(values, mean, low, high)


def estimate_difference(
    before: Sequence[float], after: Sequence[float], bounds: Bounds | None = None
) -> Estimate:
    """Return how much greater `after` is on average, pair by pair: mean and 95 % interval, with `bounds` of
    the values. Raises ValueError for no pairs."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    mean, n = _mean(differences), len(differences)
    low, high = all_bounds((*before, *after), bounds)
    if math.isfinite(width := high - low):
        apart = math.fsum(pstdev(values, _mean(values)) ** 2 for values in (before, after))
        return _wilson(mean, pstdev(differences, mean) ** 2 / n, n, -width, width, prior=apart or None)
    return _student(differences, mean)


def _wilson(
    mean: float, variance: float, n: int, lowest: float, highest: float, *, prior: float | None = None
) -> Estimate:
    """Return Wilson's interval (1927) for a mean of `n` values in [lowest, highest] with a `variance`.

    A proportion p has the variance p (1 - p) / n. A mean with half that variance counts as a proportion of
    twice as many values. A few values that are equal by chance must not promise too much. So two prior values
    with the variance `prior` are added; by default it is the largest there is, a proportion's. For zeros and
    ones this is Wilson's own interval.
    """
    width = highest - lowest
    if width == 0:
        return Estimate(mean, mean, mean, n)
    p = min(max((mean - lowest) / width, 0.0), 1.0)
    most = p * (1 - p) * width**2
    of_one = (n * variance * n + _PRIOR * (most if prior is None else prior)) / (n + _PRIOR)
    count = n * most / of_one if most > 0 and of_one > 0 else n
    z2 = _Z95**2
    centre = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z95 * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    # Rounding could put the mean outside of an interval that contains it by algebra.
    low = min(max(0.0, centre - half), p) * width + lowest
    high = max(min(1.0, centre + half), p) * width + lowest
    return Estimate(mean, min(low, mean), max(high, mean), n)


def _student(
    values: Sequence[float], mean: float, lowest: float = -math.inf, highest: float = math.inf
) -> Estimate:
    """Return Student's t interval of a mean, cut off at a bound; infinite if the values are all equal."""
    n = len(values)
    half = t95(n - 1) * pstdev(values, mean) / math.sqrt(n - 1) if min(values) < max(values) else math.inf
    return Estimate(mean, max(mean - half, lowest), min(mean + half, highest), n)


def t95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, by degrees of freedom, correct to a thousandth.

    Fisher and Cornish's expansion (1960); exact for 1 and 2.
    """
    if freedom <= 2:
        return (12.706205, 4.302653)[freedom - 1]
    z, v = _Z95, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def _mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("cannot estimate the mean of no values")
    # Rounding must not put the mean outside of the observed values.
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def shown_seconds(seconds: float) -> str:
    """Return a duration as text: `3.2 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


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
    def build(cls, rewards: Sequence[float], bounds: Bounds | None = None) -> Self:
        """Return the distribution of one or more rewards, whose evaluator declares these `bounds`."""
        low, best, full = min(rewards), max(rewards), all_bounds(rewards, bounds)[1]
        counts = Counter(rewards)
        bars = [Bar(value, value, count) for value, count in sorted(counts.items())]
        if len(counts) > _BARS:
            # Halved, so that the width between any two finite numbers is finite.
            width = best / 2 - low / 2
            places = Counter(min(int((each / 2 - low / 2) / width * _BARS), _BARS - 1) for each in rewards)
            edges = [low + 2 * width * (place / _BARS) for place in range(_BARS)] + [best]
            bars = [Bar(edges[place], edges[place + 1], places[place]) for place in range(_BARS)]
        return cls(
            n=len(rewards),
            best=best,
            best_count=counts[best],
            full=full if math.isfinite(full) else None,
            bars=tuple(bars),
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
