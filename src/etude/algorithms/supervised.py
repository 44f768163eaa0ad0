"""Supervised: imitate episodes, whatever they earned."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from etude.algorithms.algorithm import Algorithm
from etude.core.sample import Kind

if TYPE_CHECKING:
    import torch

    from etude.learner.objective import MicroBatch


class Supervised(Algorithm, name="supervised"):
    """Every episode for supervised training.

    L = -Σ w·log π / Σ w: the mean negative log-likelihood of the sampled tokens.
    """

    kind: ClassVar[Kind] = "imitation"

    def loss(self, logprobs_BT: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """That mean, which is the metric `nll` too."""
        loss = -(batch.weights_BT * logprobs_BT).sum()
        return loss, {"nll": float(loss.detach())}
