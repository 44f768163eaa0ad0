"""GRPO: clipped policy gradient with group advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from etude.learner.aggregation import Aggregation, normalised
from etude.learner.batch import TokenSequence
from etude.learner.objective import MicroBatch
from etude.learner.off_policy import Correction, importance_weights, strayed
from etude.learner.surrogate import Ratio, Surrogate, gains, log_ratios

KlEstimator = Literal["k3", "unbiased"]
"""Schulman's (2020), or that times the ratio, whose gradient is that of the KL (DeepSeek-V3.2, 2025)."""


@dataclass(frozen=True, slots=True)
class Grpo:
    """L = -Σ w·v·min(r·A, clip(r, 1-ε_low, 1+ε_high)·A) + β·Σ w·(e^d - d - 1) - c·Σ w·H

    with r = π/π_sampled, v = 1, d = log π_ref - log π, and the entropy H of each token's distribution. With
    `cispo` the first sum is that of w·v·min(r, 1+ε_high)·A·log π, where r is a constant. With a correction,
    v is the bounded π/π_sampled and r = π/π_now, with π_now that of the step's start. Sequences of which the
    policy has strayed by more than `off_policy_limit` have v = 0 where A < 0 (DeepSeek-V3.2, 2025).
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0
    aggregation: Aggregation = "token"
    constant_length: int = 256
    ratio: Ratio = "token"
    surrogate: Surrogate = "clip"
    kl_estimator: KlEstimator = "k3"
    entropy_bonus: float = 0.0
    correction: Correction = "none"
    correction_level: Ratio = "token"
    correction_floor: float = 0.0
    correction_cap: float = 2.0
    off_policy_limit: float | None = None

    @property
    def needs_reference(self) -> bool:
        """Only the KL term looks at the reference."""
        return self.beta > 0

    @property
    def needs_entropy(self) -> bool:
        """Only the bonus looks at it."""
        return self.entropy_bonus > 0

    @property
    def skips_idle(self) -> bool:
        """Without advantage there are only the KL and the entropy."""
        return not self.needs_reference and not self.needs_entropy

    def normalised(self, units: Sequence[Sequence[TokenSequence]]) -> list[list[float]]:
        """See `Objective.normalised`."""
        return normalised(units, self.aggregation, self.constant_length)

    def loss(self, logprobs_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """See `Objective.loss`."""
        trained_BT = micro.weights_BT > 0
        weights_BT = micro.weights_BT
        log_ratio_BT = torch.where(trained_BT, logprobs_BT - micro.sampled_BT, 0.0)
        told = {"sampled_kl": log_ratio_BT.detach().exp() - 1 - log_ratio_BT.detach()}
        from_BT = log_ratio_BT
        if self.correction != "none":
            level, bounds = self.correction_level, (self.correction_floor, self.correction_cap)
            bounded_BT, told["out_of_bounds"] = importance_weights(
                self.correction, level, log_ratio_BT, *bounds
            )
            weights_BT, from_BT = weights_BT * bounded_BT, log_ratio_BT - log_ratio_BT.detach()
        if self.off_policy_limit is not None:
            told["strayed"] = strayed(log_ratio_BT, trained_BT, self.off_policy_limit) & (
                micro.advantages_BT < 0
            )
            weights_BT = weights_BT.masked_fill(told["strayed"], 0.0)
        ratio_BT = log_ratios(self.ratio, from_BT, trained_BT).exp()
        gain_BT, told["clip_fraction"] = gains(
            self.surrogate, ratio_BT, logprobs_BT, micro.advantages_BT, self.clip_low, self.clip_high
        )
        loss = -(weights_BT * gain_BT).sum()
        if micro.reference_BT is not None:
            gap_BT = torch.where(trained_BT, micro.reference_BT - logprobs_BT, 0.0)
            kl_BT = gap_BT.exp() - gap_BT - 1
            kl_BT = kl_BT * log_ratio_BT.exp() if self.kl_estimator == "unbiased" else kl_BT
            loss = loss + self.beta * (micro.weights_BT * kl_BT).sum()
            told["reference_kl"] = kl_BT.detach()
        if micro.entropy_BT is not None:
            loss = loss - self.entropy_bonus * (micro.weights_BT * micro.entropy_BT).sum()
            told["entropy"] = micro.entropy_BT.detach()
        return loss, {name: float((of * trained_BT).sum()) * micro.token_share for name, of in told.items()}
