"""SFT: raise the likelihood of the tokens on record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from etude.learner.batch import TokenSequence
from etude.learner.objective import MicroBatch


@dataclass(frozen=True, slots=True)
class Sft:
    """L = -Σ w·log π / Σ w: the mean negative log-likelihood of the trained tokens."""

    needs_reference: bool = False
    needs_entropy: bool = False
    skips_idle: bool = False

    def normalised(self, units: Sequence[Sequence[TokenSequence]]) -> list[list[float]]:
        """See `Objective.normalised`."""
        total = sum(sum(sequence.weights) for unit in units for sequence in unit)
        return [[1.0 / max(total, 1e-9)] * len(unit) for unit in units]

    def loss(self, logprobs_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """See `Objective.loss`."""
        loss = -(micro.weights_BT * logprobs_BT).sum()
        return loss, {"nll": float(loss.detach())}
