"""Supervised: imitate episodes, whatever they earned."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from etude.algorithms.algorithm import Algorithm
from etude.core.errors import RequestError
from etude.core.sample import Kind

if TYPE_CHECKING:
    import torch

    from etude.learner.objective import MicroBatch


class Supervised(Algorithm, name="supervised"):
    """Every episode for supervised training.

    L = -Σ w·log π / Σ w: the mean negative log-likelihood of the sampled tokens.
    """

    kind: ClassVar[Kind] = "imitation"

    def check(self) -> None:
        """Raise RequestError for a penalty, which changes nothing where rewards are not looked at."""
        if self.cut_off_penalty and type(self).groups is Supervised.groups:
            raise RequestError(
                f"{self.type_name} imitates episodes whatever they earned, and cut_off_penalty is taken from "
                "what they earn; take `cut_off: mask` or `drop`"
            )
        super().check()

    def loss(self, logprobs_BT: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """That mean, which is the metric `nll` too."""
        loss = -(batch.weights_BT * logprobs_BT).sum()
        return loss, {"nll": float(loss.detach())}
