"""DPO: learn from pairs which of two responses is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from etude.learner.batch import TokenSequence
from etude.learner.objective import MicroBatch

DpoLoss = Literal["sigmoid", "sigmoid_norm", "ipo"]
"""DPO (Rafailov et al., 2023), the same on means per token, and IPO (Azar et al., 2023), which its authors
compute on means per token too."""


@dataclass(frozen=True, slots=True)
class Dpo:
    """L = -log σ(β·m), or of IPO (m - 1/2β)², with m = Σ(log π - log π_ref) of chosen minus that of rejected.

    Where the loss is on means per token, each sum is divided by its number of tokens. Label smoothing is that
    of cDPO (Mitchell, 2023): -(1-ε)·log σ(β·m) - ε·log σ(-β·m).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_kind: DpoLoss = "sigmoid"
    reference: Literal["sampler", "base"] = "sampler"
    """The policy that sampled the pair, whose logprobs are on record, or the base model."""
    needs_entropy: bool = False
    skips_idle: bool = False

    @property
    def needs_reference(self) -> bool:
        """The sampler's logprobs come with the data."""
        return self.reference == "base"

    def normalised(self, units: Sequence[Sequence[TokenSequence]]) -> list[list[float]]:
        """Weights stay masks: a response counts by its sum. See `Objective.normalised`."""
        return [[1.0] * len(unit) for unit in units]

    def loss(self, logprobs_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """The mean over pairs. See `Objective.loss`."""
        reference_BT = micro.sampled_BT if micro.reference_BT is None else micro.reference_BT
        gain_B = ((logprobs_BT - reference_BT) * micro.weights_BT).sum(dim=1)
        if self.loss_kind != "sigmoid":
            gain_B = gain_B / micro.weights_BT.sum(dim=1).clamp(min=1)
        margin_P = gain_B[0::2] - gain_B[1::2]
        with torch.no_grad():
            metrics = {
                "preferred": float((margin_P > 0).float().sum()) * micro.unit_share,
                "margin": float(self.beta * margin_P.sum()) * micro.unit_share,
            }
        return self._of_margins(margin_P).sum() * micro.unit_share, metrics

    def _of_margins(self, margin_P: torch.Tensor) -> torch.Tensor:
        if self.loss_kind == "ipo":
            return (margin_P - 1 / (2 * self.beta)) ** 2
        smoothing, scaled_P = self.label_smoothing, self.beta * margin_P
        return -F.logsigmoid(scaled_P) * (1 - smoothing) - F.logsigmoid(-scaled_P) * smoothing
