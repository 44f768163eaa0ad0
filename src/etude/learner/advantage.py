"""Advantages by group: how much better an episode did than its siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

AdvantageScale = Literal["std", "none"]
"""`std` divides by the group's standard deviation (GRPO, Shao et al., 2024); `none` does not
(Dr. GRPO, Liu et al., 2025)."""


def group_advantages(rewards: Sequence[float], scale: AdvantageScale = "std") -> list[float]:
    """Rewards of one group minus their mean, scaled. A group of one, or of equals, has advantage 0."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if scale == "none":
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    # Rounding can leave a whisper of deviation among equal rewards; it must not be blown up to 1.
    if deviation <= 1e-9 * max(1.0, abs(mean)):
        return [0.0] * len(rewards)
    return [value / deviation for value in centred]


def turn_advantages(returns: Sequence[Sequence[float]], scale: AdvantageScale = "std") -> list[list[float]]:
    """Advantages of every turn against the same turn of its siblings; shapes as `returns`.

    `returns[i][t]` is the discounted return of episode i from turn t on. Episodes may differ in length.
    """
    result: list[list[float]] = [[] for _ in returns]
    for turn in range(max((len(values) for values in returns), default=0)):
        there = [index for index, values in enumerate(returns) if len(values) > turn]
        advantages = group_advantages([returns[index][turn] for index in there], scale)
        for index, advantage in zip(there, advantages, strict=True):
            result[index].append(advantage)
    return result
