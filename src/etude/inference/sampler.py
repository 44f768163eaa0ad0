"""Rows being sampled, and drawing their next tokens: the same way however requests are batched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy
import torch

from etude.core.call import Sampling
from etude.core.errors import EngineError
from etude.core.keys import generator


@dataclass(slots=True, eq=False)
class Row:
    """One sequence that is being sampled."""

    conversation: str
    ids: list[int]
    """Prompt, then what was sampled."""
    sampling: Sampling
    uniform: Iterator[float]
    """The row's own random numbers, one for each token."""
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens."""
    top: int = 0
    """How many of the most likely tokens to keep at each step."""
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    """For each sampled token, the most likely tokens in its place and their logprobs, best first."""
    slot: int = -1
    cached: int = 0
    """Leading tokens whose keys and values are in the slot."""

    @property
    def pending(self) -> int:
        """Tokens that the model has not read yet."""
        return len(self.ids) - self.cached


def uniforms(key: int) -> Iterator[float]:
    """The stream of uniform numbers in [0, 1) that belongs to a request."""
    draw = generator(key).random
    while True:
        yield draw()


def append_samples(rows: Sequence[Row], logits_BV: torch.Tensor) -> None:
    """Draw one token for each row from its logits. Raises EngineError when they are not finite."""
    samplings, device = [row.sampling for row in rows], logits_BV.device
    uniforms_B1 = numpy.array([[next(row.uniform)] for row in rows], numpy.float32)
    uniform_B1 = torch.from_numpy(uniforms_B1).to(device)
    if all(sampling.temperature == 1 and sampling.top_p == 1 for sampling in samplings):
        probs_BV, greedy_B = torch.softmax(logits_BV.float(), dim=-1), None
    else:
        temperature_B, top_p_B = torch.tensor(
            [[sampling.temperature for sampling in samplings], [sampling.top_p for sampling in samplings]],
            device=device,
        )
        probs_BV, greedy_B = distribution(logits_BV, temperature_B, top_p_B), temperature_B == 0
    ids_B1, logprobs_B1 = draw(probs_BV, greedy_B, uniform_B1)
    for row, (token,), (logprob,) in zip(rows, ids_B1.tolist(), logprobs_B1.tolist(), strict=True):
        row.ids.append(token)
        row.logprobs.append(logprob)
    for index, row in enumerate(rows):
        if row.top:
            best, tokens = probs_BV[index].topk(min(row.top, probs_BV.shape[1]))
            row.top_logprobs.append(tuple(zip(tokens.tolist(), best.log().tolist(), strict=True)))


def distribution(logits_BV: torch.Tensor, temperature_B: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Probabilities [B, V] that rows are drawn from; of greedy rows the model's own."""
    greedy_B = temperature_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperature_B)
    probs_BV = torch.softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    cut_B = ~greedy_B & (top_p_B < 1)
    if bool(cut_B.any()):
        probs_BV = torch.where(cut_B[:, None], _nucleus(probs_BV, top_p_B), probs_BV)
    return probs_BV


def draw(
    probs_BV: torch.Tensor, greedy_B: torch.Tensor | None, uniform_B1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token id a row [B, 1], and its logprob [B, 1] under the distribution that it was drawn from.

    Inverse-CDF sampling: one uniform number a token, so that a row's draw depends on that row alone. Greedy
    rows, none where `greedy_B` is None, take the likeliest. Raises EngineError when the probabilities are not
    finite.
    """
    cdf_BV = probs_BV.cumsum(dim=-1)
    total_B1 = cdf_BV[:, -1:]
    if not all(math.isfinite(total) for (total,) in total_B1.tolist()):
        raise EngineError(
            "the model's logits are not finite: its weights are damaged, or overflow in its dtype"
        )
    # Below the total even where the product is rounded up to it: past the end there is no token.
    threshold_B1 = uniform_B1.clamp(max=1 - 2**-23).mul_(total_B1)
    ids_B1 = torch.searchsorted(cdf_BV, threshold_B1, right=True)
    if greedy_B is not None and bool(greedy_B.any()):
        ids_B1 = torch.where(greedy_B[:, None], probs_BV.argmax(dim=-1, keepdim=True), ids_B1)
    return ids_B1, probs_BV.gather(1, ids_B1).log_()


def _nucleus(probs_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of tokens with mass top_p (Holtzman et al., 2020), and renormalise."""
    ordered_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = ordered_BV.cumsum(dim=-1) - ordered_BV
    beyond_BV = before_BV >= top_p_B[:, None]
    kept_BV = probs_BV.masked_fill(beyond_BV.scatter(1, order_BV, beyond_BV), 0.0)
    return kept_BV / kept_BV.sum(dim=-1, keepdim=True)
