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


@dataclass(frozen=True, slots=True)
class Grpo:
    """L = -Σ w·min(r·A, clip(r, 1-ε_low, 1+ε_high)·A) + β·Σ w·(e^d - d - 1)

    with r = π/π_sampled and d = log π_ref - log π (the k3 estimate of KL, Schulman, 2020).
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0
    aggregation: Aggregation = "token"
    constant_length: int = 256

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
        log_ratio_BT = torch.where(micro.weights_BT > 0, logprobs_BT - micro.sampled_BT, 0.0)
        ratio_BT = log_ratio_BT.exp()
        clipped_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain_BT = torch.minimum(ratio_BT * micro.advantages_BT, clipped_BT * micro.advantages_BT)
        loss = -(micro.weights_BT * gain_BT).sum()
        with torch.no_grad():
            off_BT = ratio_BT * micro.advantages_BT > clipped_BT * micro.advantages_BT
            metrics = {
                "clip_fraction": float(off_BT.sum()) * micro.token_share,
                "sampled_kl": float((ratio_BT - 1 - log_ratio_BT).sum()) * micro.token_share,
            }
        if self.beta > 0 and micro.reference_BT is not None:
            gap_BT = torch.where(micro.weights_BT > 0, micro.reference_BT - logprobs_BT, 0.0)
            kl = (micro.weights_BT * (gap_BT.exp() - gap_BT - 1)).sum()
            loss = loss + self.beta * kl
            metrics["reference_kl"] = float(kl.detach())
        return loss, metrics
