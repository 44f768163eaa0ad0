"""Importance weights for tokens that another policy sampled: an older one, or the same in another engine."""

from __future__ import annotations

from typing import Literal

import torch

Correction = Literal["none", "truncate", "mask"]
"""Weights that are bounded (truncated importance sampling, Yao et al., 2025), or 0 where they are out of
bounds (Zheng et al., 2025)."""


def importance_weights(
    kind: Correction,
    level: Literal["token", "sequence"],
    log_ratio_BT: torch.Tensor,
    floor: float,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """π/π_sampled within bounds, [B, T], and where it was out of them.

    `log_ratio_BT` are logarithms of the tokens' ratios, 0 where nothing is trained. The ratio of a sequence
    is the product of its tokens'. There is no gradient.
    """
    log_ratio_BT = log_ratio_BT.detach()
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.exp()
    out_BT = (ratio_BT < floor) | (ratio_BT > cap)
    if kind == "mask":
        return ratio_BT.masked_fill(out_BT, 0.0), out_BT
    return ratio_BT.clamp(floor, cap), out_BT


def strayed(log_ratio_BT: torch.Tensor, trained_BT: torch.Tensor, limit: float) -> torch.Tensor:
    """Of which sequences [B, 1] the policy has moved away: the mean of log π_sampled/π is above the limit."""
    lengths_B1 = trained_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return -log_ratio_BT.detach().sum(dim=1, keepdim=True) / lengths_B1 > limit
