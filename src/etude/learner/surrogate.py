"""Surrogates: what is made to grow in place of the reward, for tokens that another policy sampled."""

from __future__ import annotations

from typing import Literal

import torch

Ratio = Literal["token", "sequence"]
"""Each token's own ratio, or for all tokens of a sequence the geometric mean of theirs (GSPO, Zheng et al.,
2025)."""

Surrogate = Literal["clip", "cispo"]
"""PPO's, or importance weights that are truncated and have no gradient (CISPO, MiniMax, 2025)."""


def log_ratios(kind: Ratio, log_ratio_BT: torch.Tensor, trained_BT: torch.Tensor) -> torch.Tensor:
    """Logarithms of the ratios that count, from those of the tokens, which are 0 where nothing is trained."""
    if kind == "token":
        return log_ratio_BT
    lengths_B1 = trained_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return (log_ratio_BT.sum(dim=1, keepdim=True) / lengths_B1).expand_as(log_ratio_BT)


def gains(
    kind: Surrogate,
    ratio_BT: torch.Tensor,
    logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is to grow for each token, and whether its ratio was cut; ratios count from 1-low to 1+high."""
    if kind == "cispo":
        weight_BT = ratio_BT.detach().clamp(max=1 + high)
        return weight_BT * advantages_BT * logprobs_BT, ratio_BT > 1 + high
    plain_BT, cut_BT = ratio_BT * advantages_BT, ratio_BT.clamp(1 - low, 1 + high) * advantages_BT
    return torch.minimum(plain_BT, cut_BT), plain_BT > cut_BT
