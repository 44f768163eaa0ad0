"""Means with their 95 % intervals, and figures as one says them.

All intervals that are printed or stored are made here.

Values that cannot leave certain bounds have Wilson's score interval within these bounds, for values in
between too, and so have their differences. The bounds are those that an evaluator or a protocol declares.
Where none are declared, the values decide: those that all lie in [0, 1], or else in [-1, 1], are taken to
stay there. All other values have Student's t interval, which ends at a bound that is on one side only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Bounds: TypeAlias = tuple[float, float]
"""The least and the most that a value can be; infinite on a side that has no bound."""

_PRESUMED: tuple[Bounds, ...] = ((0.0, 1.0), (-1.0, 1.0))
_Z95 = 1.959964
_PRIOR = 2.0
"""Values that are added to those that were observed, in judging how far they spread."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % confidence interval, which is infinite where the values do not tell one."""

    mean: float
    low: float
    high: float
    n: int
    """How many values."""

    def __str__(self) -> str:
        return f"{shown_mean(self.mean, self.low, self.high)} n={self.n}"


def shown_mean(
    mean: float, low: float | None, high: float | None, *, sign: str = "", n: int | None = None
) -> str:
    """A mean with its interval as text; without the interval where it is not known.

    `sign` is `+` for numbers that begin with their sign. With `n` values it says why several of them do not
    tell an interval.
    """

    def shown(value: float) -> str:
        return f"{value:{sign}.3f}" if abs(value) < 1e6 else f"{value:{sign}.4g}"

    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return shown(mean) + (" (all equal: no interval)" if low is None and n is not None and n > 1 else "")
    return f"{shown(mean)} [{shown(low)}, {shown(high)}]"


def shared_bounds(declared: Iterable[Sequence[float] | None]) -> Bounds | None:
    """The bounds that hold for all of some values, each with its own; None where one of them has none."""
    ends = {None if bounds is None else (bounds[0], bounds[1]) for bounds in declared}
    known = [bounds for bounds in ends if bounds is not None]
    if not known or len(known) < len(ends):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def bounds_of(values: Iterable[float], declared: Bounds | None = None) -> Bounds:
    """The bounds that values have: those that are `declared`, or else those that they are taken to have."""
    if declared is not None:
        return declared
    known = list(values)
    within = (bounds for bounds in _PRESUMED if all(bounds[0] <= value <= bounds[1] for value in known))
    return next(within, (-math.inf, math.inf))


def estimate(values: Sequence[float], bounds: Bounds | None = None) -> Estimate:
    """Mean and 95 % interval of independent values. Raises ValueError for no values.

    `bounds` are those that were declared for the values. Without any, one value outside of [-1, 1], or
    several that are all equal, tell nothing about how far values spread: the interval is infinite then.
    """
    mean, n = _mean(values), len(values)
    low, high = bounds_of(values, bounds)
    if math.isfinite(high - low):
        return _within(mean, _spread(values, mean) ** 2 / n, n, low, high)
    return _student(values, mean, low, high)


def estimate_difference(
    before: Sequence[float], after: Sequence[float], bounds: Bounds | None = None
) -> Estimate:
    """By how much `after` is greater on average, pair by pair: mean and 95 % interval.

    `bounds` are those of the values; a difference is at most as great as they are apart. Raises ValueError
    for no pairs.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    mean, n = _mean(differences), len(differences)
    low, high = bounds_of((*before, *after), bounds)
    if math.isfinite(width := high - low):
        apart = math.fsum(_spread(values, _mean(values)) ** 2 for values in (before, after))
        return _within(mean, _spread(differences, mean) ** 2 / n, n, -width, width, prior=apart or None)
    return _student(differences, mean)


def _within(
    mean: float, variance: float, n: int, lowest: float, highest: float, *, prior: float | None = None
) -> Estimate:
    """Wilson's interval (1927), of a mean of `n` values in [lowest, highest] that has a `variance`.

    A proportion p has the variance p (1 - p) / n. A mean with half of that counts as a proportion of
    twice as many values. So that a few values that are alike by chance do not promise too much, two
    with the variance `prior` are thought to be among them: by default that of a proportion, the
    greatest there is. For zeros and ones this is Wilson's own.
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
    # The mean is within by algebra, and by a rounding error it would not be.
    low = min(max(0.0, centre - half), p) * width + lowest
    high = max(min(1.0, centre + half), p) * width + lowest
    return Estimate(mean, min(low, mean), max(high, mean), n)


def _student(
    values: Sequence[float], mean: float, lowest: float = -math.inf, highest: float = math.inf
) -> Estimate:
    """Student's t interval of a mean, cut off at a bound; infinite where the values are all equal."""
    n = len(values)
    spreads = min(values) < max(values)
    half = t95(n - 1) * _spread(values, mean) / math.sqrt(n - 1) if spreads else math.inf
    return Estimate(mean, max(mean - half, lowest), min(mean + half, highest), n)


def t95(freedom: int) -> float:
    """The 97.5 % quantile of Student's t with so many degrees of freedom, right to a thousandth.

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
    # Rounding must not put it outside of what was observed.
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def _spread(values: Sequence[float], mean: float) -> float:
    """The standard deviation of the values themselves (divided by n), also of very great ones."""
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))


def shown_seconds(seconds: float) -> str:
    """A duration as one says it: `3.2 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
