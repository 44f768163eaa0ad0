"""DPO: learn from pairs which of two responses is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from etude.learner.batch import TokenSequence
from etude.learner.objective import MicroBatch


@dataclass(frozen=True, slots=True)
class Dpo:
    """L = -log σ(β·m) with m = Σ(log π - log π_ref) of chosen minus that of rejected
    (Rafailov et al., 2023); label smoothing as in cDPO (Mitchell, 2023).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
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
        margin_P = self.beta * (gain_B[0::2] - gain_B[1::2])
        smoothing = self.label_smoothing
        loss_P = -F.logsigmoid(margin_P) * (1 - smoothing) - F.logsigmoid(-margin_P) * smoothing
        with torch.no_grad():
            metrics = {
                "preferred": float((margin_P > 0).float().sum()) * micro.unit_share,
                "margin": float(margin_P.sum()) * micro.unit_share,
            }
        return loss_P.sum() * micro.unit_share, metrics
