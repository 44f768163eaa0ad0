"""RLOO: REINFORCE with the mean reward of the other episodes of the example for a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, FiniteFloat

from etude.algorithms.algorithm import OfGradient
from etude.algorithms.grpo import Grpo


class Rloo(Grpo, name="rloo"):
    """Groups of episodes for RLOO (REINFORCE leave-one-out, Ahmadian et al., 2024).

    The advantage of an episode is its reward minus the mean of its siblings' rewards, and its loss is summed
    over its tokens: `aggregation: constant` with a `constant_length` of 1. Ratios are clipped as in PPO.
    """

    clip_high: OfGradient[FiniteFloat] = Field(0.2, gt=0)
    """ε_high of the clipped ratio."""
    aggregation: OfGradient[Literal["token", "sequence", "constant"]] = "constant"
    """Averages over all tokens, per sequence, or sums divided by a constant."""
    constant_length: OfGradient[int] = Field(1, ge=1)
    """The constant of `aggregation: constant`, in tokens."""
    advantage_scale: OfGradient[Literal["std", "none"]] = "none"
    """Divide by the group's deviation, or not."""

    def compare(self, rewards: Sequence[float]) -> list[float]:
        """Each reward minus the mean of the others: the distance to the mean of all, times n / (n - 1)."""
        factor = len(rewards) / max(len(rewards) - 1, 1)
        return [value * factor for value in super().compare(rewards)]
