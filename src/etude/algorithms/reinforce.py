"""REINFORCE with other baselines than GRPO's: the other episodes (RLOO), or the whole batch (REINFORCE++)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, FiniteFloat

from etude.algorithms.algorithm import OfGradient
from etude.algorithms.episodes import UnitGroup
from etude.algorithms.grpo import Grpo
from etude.core.sample import Sample


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


class ReinforcePP(Grpo, name="reinforce_pp"):
    """Episodes for REINFORCE++ (Hu, 2025).

    The advantage of a token is the reward of its episode, normalised over all sampled tokens of the batch:
    their mean is 0 and their deviation 1. With `baseline` (REINFORCE++-baseline) the mean of the group is
    taken off first, as suits several episodes of each example.
    """

    baseline: OfGradient[bool] = False
    """Compare with the group before normalising."""
    drop_flat_groups: bool = False
    """Leave out groups in which no episode has an advantage over the others. They do have one here, unless
    there is a `baseline`."""

    def check(self) -> None:
        """Raise RequestError for groups that can never have an advantage."""
        compares = self.baseline or self.drop_flat_groups
        Grpo.check(self.model_copy(update={"baseline": compares, "drop_flat_groups": compares}))

    def compared(self, groups: Sequence[UnitGroup]) -> list[bool]:
        """For each group whether any sample has an advantage over the others, without the batch."""
        within = self.model_copy(update={"baseline": True})
        return [bool(group.units) and within.differ(group.samples) for group in groups]

    def compare(self, rewards: Sequence[float]) -> list[float]:
        """The rewards themselves, or their distance to the group's mean."""
        mean = math.fsum(rewards) / max(len(rewards), 1) if self.baseline else 0.0
        return [reward - mean for reward in rewards]

    def assigned(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """The samples with advantages that are normalised over all of their sampled tokens."""
        assigned = super().assigned(groups)
        if any(sample.advantages is not None for group in groups for sample in group):
            return assigned
        samples = [sample for group in assigned for sample in group]
        rows = [zip(sample.mask, sample.advantages or (), strict=False) for sample in samples]
        values = [value for row in rows for sampled, value in row if sampled]
        mean = math.fsum(values) / max(len(values), 1)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values), 1))
        scale = 0.0 if deviation <= 1e-9 * max(1.0, abs(mean)) else 1 / deviation

        def normalised(sample: Sample) -> Sample:
            pairs = zip(sample.mask, sample.advantages or (), strict=True)
            gains = ((value - mean) * scale if sampled else 0.0 for sampled, value in pairs)
            return replace(sample, advantages=tuple(gains))

        return [[*map(normalised, group)] for group in assigned]
