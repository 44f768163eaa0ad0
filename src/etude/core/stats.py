"""Means with honest intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] n={self.n}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of independent values.

    For values in {0, 1} the Wilson score interval, otherwise the normal interval of the mean.
    Raises ValueError for no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("cannot estimate the mean of no values")
    mean = math.fsum(values) / n
    if all(value in (0.0, 1.0) for value in values):
        return _wilson(mean, n)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(n - 1, 1)
    half = _Z95 * math.sqrt(variance / n)
    return Estimate(mean, mean - half, mean + half, n)


def _wilson(p: float, n: int) -> Estimate:
    """Wilson, E. B. (1927): an interval for a proportion that holds near 0 and 1 too."""
    z2 = _Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half), n)
