"""Drawing a token from logits, the same way however requests are batched."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from etude.core.keys import generator


def uniforms(key: int) -> Iterator[float]:
    """The stream of uniform numbers in [0, 1) that belongs to a request."""
    draw = generator(key).random
    while True:
        yield draw()


def sample(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, top_p_B: torch.Tensor, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B] and their logprobs [B] under the distribution that they were drawn from.

    Inverse-CDF sampling: one uniform number a token, so that a row's draw depends on that row alone.
    Rows with temperature 0 are greedy; their logprobs are the model's own.
    """
    greedy_B = temperature_B == 0
    scale_B = torch.where(greedy_B, torch.ones_like(temperature_B), temperature_B)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    if bool((top_p_B < 1).any()):
        logprobs_BV = _nucleus(logprobs_BV, torch.where(greedy_B, torch.ones_like(top_p_B), top_p_B))
    cdf_BV = logprobs_BV.exp().cumsum(dim=-1)
    threshold_B = uniform_B * cdf_BV[:, -1]
    drawn_B = torch.searchsorted(cdf_BV, threshold_B[:, None], right=True).squeeze(1)
    # Rounding may push the threshold to the end of the CDF, past the last token that has probability.
    last_B = (logprobs_BV > -torch.inf).long().cumsum(dim=-1).argmax(dim=-1)
    ids_B = torch.where(greedy_B, logprobs_BV.argmax(dim=-1), torch.minimum(drawn_B, last_B))
    return ids_B, logprobs_BV.gather(1, ids_B[:, None]).squeeze(1)


def _nucleus(logprobs_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of tokens with mass top_p (Holtzman et al., 2020), and renormalise."""
    ordered_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
    before_BV = ordered_BV.exp().cumsum(dim=-1) - ordered_BV.exp()
    drop_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(
        1, order_BV, before_BV >= top_p_B[:, None].clamp(max=1.0)
    )
    drop_BV &= top_p_B[:, None] < 1
    return torch.log_softmax(logprobs_BV.masked_fill(drop_BV, -torch.inf), dim=-1)
