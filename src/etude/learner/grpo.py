"""GRPO: clipped policy gradient with group advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from etude.learner.batch import TokenSequence
from etude.learner.objective import MicroBatch

Aggregation = Literal["token", "sequence", "constant"]
"""`token` weighs all tokens of a step alike (DAPO, Yu et al., 2025), `sequence` all sequences alike
(GRPO, Shao et al., 2024), `constant` divides by a fixed length (Dr. GRPO, Liu et al., 2025)."""

Ratio = Literal["token", "sequence"]
"""Each token's own ratio, or for all tokens of a sequence the geometric mean of theirs (GSPO, Zheng et al.,
2025)."""

Surrogate = Literal["clip", "cispo"]
"""PPO's, or importance weights that are truncated and have no gradient (CISPO, MiniMax, 2025)."""


KlEstimator = Literal["k3", "unbiased"]
"""Schulman's (2020), or that times the ratio, whose gradient is that of the KL (DeepSeek-V3.2, 2025)."""


@dataclass(frozen=True, slots=True)
class Grpo:
    """L = -Σ w·min(r·A, clip(r, 1-ε_low, 1+ε_high)·A) + β·Σ w·(e^d - d - 1)

    with r = π/π_sampled and d = log π_ref - log π (the k3 estimate of KL, Schulman, 2020). With `cispo` the
    first sum is that of w·min(r, 1+ε_high)·A·log π, where r is a constant.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0
    aggregation: Aggregation = "token"
    constant_length: int = 256
    ratio: Ratio = "token"
    surrogate: Surrogate = "clip"
    kl_estimator: KlEstimator = "k3"

    @property
    def needs_reference(self) -> bool:
        """Only the KL term looks at the reference."""
        return self.beta > 0

    @property
    def skips_idle(self) -> bool:
        """Without advantage there is only the KL term."""
        return self.beta == 0

    def normalised(self, units: Sequence[Sequence[TokenSequence]]) -> list[list[float]]:
        """See `Objective.normalised`."""
        masses = [[sum(sequence.weights) for sequence in unit] for unit in units]
        rows = sum(1 for unit in masses for mass in unit if mass)
        tokens = sum(sum(unit) for unit in masses)
        if self.aggregation == "token":
            return [[1.0 / max(tokens, 1e-9)] * len(unit) for unit in masses]
        if self.aggregation == "constant":
            return [[1.0 / (rows * self.constant_length)] * len(unit) for unit in masses]
        return [[1.0 / (rows * mass) if mass else 0.0 for mass in unit] for unit in masses]

    def loss(self, logprobs_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """See `Objective.loss`."""
        trained_BT = micro.weights_BT > 0
        log_ratio_BT = torch.where(trained_BT, logprobs_BT - micro.sampled_BT, 0.0)
        ratio_BT = self._ratio(log_ratio_BT, trained_BT).exp()
        gain_BT, off_BT = self._gain(ratio_BT, logprobs_BT, micro.advantages_BT)
        loss = -(micro.weights_BT * gain_BT).sum()
        with torch.no_grad():
            metrics = {
                "clip_fraction": float((off_BT & trained_BT).sum()) * micro.token_share,
                "sampled_kl": float((log_ratio_BT.exp() - 1 - log_ratio_BT).sum()) * micro.token_share,
            }
        if self.beta > 0 and micro.reference_BT is not None:
            gap_BT = torch.where(trained_BT, micro.reference_BT - logprobs_BT, 0.0)
            kl_BT = gap_BT.exp() - gap_BT - 1
            kl_BT = kl_BT * log_ratio_BT.exp() if self.kl_estimator == "unbiased" else kl_BT
            kl = (micro.weights_BT * kl_BT).sum()
            loss = loss + self.beta * kl
            metrics["reference_kl"] = float(kl.detach())
        return loss, metrics

    def _ratio(self, log_ratio_BT: torch.Tensor, trained_BT: torch.Tensor) -> torch.Tensor:
        """Logarithms of the ratios that count."""
        if self.ratio == "token":
            return log_ratio_BT
        lengths_B1 = trained_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return (log_ratio_BT.sum(dim=1, keepdim=True) / lengths_B1).expand_as(log_ratio_BT)

    def _gain(
        self, ratio_BT: torch.Tensor, logprobs_BT: torch.Tensor, advantages_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is to grow for each token, and whether its ratio was cut."""
        most = 1 + self.clip_high
        if self.surrogate == "cispo":
            weight_BT = ratio_BT.detach().clamp(max=most)
            return weight_BT * advantages_BT * logprobs_BT, ratio_BT > most
        clipped_BT = ratio_BT.clamp(1 - self.clip_low, most)
        plain_BT, other_BT = ratio_BT * advantages_BT, clipped_BT * advantages_BT
        return torch.minimum(plain_BT, other_BT), plain_BT > other_BT
