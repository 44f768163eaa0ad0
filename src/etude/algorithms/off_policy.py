"""Off-policy data: weights for tokens that older weights sampled, or the same in another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, FiniteFloat

from etude.algorithms.algorithm import OfGradient
from etude.core.data_model import DataModel

if TYPE_CHECKING:
    import torch


class OffPolicy(DataModel):
    """Options of algorithms whose loss has π/π_sampled, and the weights that they make of it."""

    correction: OfGradient[Literal["none", "truncate", "mask"]] = Field(
        "none",
        description="Importance weights for tokens that other weights, or another engine, sampled: bounded "
        "(truncated importance sampling, Yao et al., 2025), or 0 out of bounds (Zheng et al., 2025).",
    )
    correction_level: OfGradient[Literal["token", "sequence"]] = Field(
        "token", description="Each token's own importance weight, or the product over the sequence."
    )
    correction_floor: OfGradient[float] = Field(0.0, ge=0, le=1, description="Their lower bound.")
    correction_cap: OfGradient[FiniteFloat] = Field(2.0, ge=1, description="Their upper bound.")
    off_policy_limit: OfGradient[FiniteFloat | None] = Field(
        None,
        gt=0,
        description="Leave out bad sequences that the policy has become this much less likely to sample, in "
        "nats per token (DeepSeek-V3.2).",
    )

    def importance(
        self, log_ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, lengths_B1: torch.Tensor
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """The weights [B, T], None where all are 1, and the metrics of what was cut.

        `log_ratio_BT` are those of the tokens without gradient, 0 where nothing is trained. Weighted are
        the tokens by π/π_sampled within bounds where there is a correction, and by 0 in sequences of which
        the policy has strayed.
        """
        weights_BT: torch.Tensor | None = None
        metrics: dict[str, torch.Tensor] = {}
        if self.correction != "none":
            counted_BT = log_ratio_BT
            if self.correction_level == "sequence":
                counted_BT = counted_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)
            ratio_BT = counted_BT.exp()
            out_BT = (ratio_BT < self.correction_floor) | (ratio_BT > self.correction_cap)
            masked = self.correction == "mask"
            weights_BT = (
                ratio_BT.masked_fill(out_BT, 0.0)
                if masked
                else ratio_BT.clamp(self.correction_floor, self.correction_cap)
            )
            metrics["out_of_bounds"] = out_BT
        if self.off_policy_limit is not None:
            moved_B1 = -log_ratio_BT.sum(dim=1, keepdim=True) / lengths_B1
            strayed_BT = (moved_B1 > self.off_policy_limit) & (advantages_BT < 0)
            ones_BT = log_ratio_BT.new_ones(log_ratio_BT.shape) if weights_BT is None else weights_BT
            weights_BT = ones_BT.masked_fill(strayed_BT, 0.0)
            metrics["strayed"] = strayed_BT
        return weights_BT, metrics
