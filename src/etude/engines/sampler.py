"""Rows being sampled, and the draw of their next tokens, which does not depend on the batch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from etude.core.call import Sampling
from etude.core.errors import EngineError
from etude.core.keys import generator
from etude.models.device import copy_to_device
from etude.models.distribution import Adjuster, adjust_logits
from etude.models.grammar import advance

_IN_CACHE = 1 << 20
"""Logits that a CPU draws from at a time: four megabytes of its cache."""


@dataclass(slots=True, eq=False)
class LiveRow:
    """A sequence that is being sampled."""

    conversation: str
    ids: list[int]
    """The prompt, then the sampled tokens."""
    sampling: Sampling
    uniform: Iterator[float]
    """The row's own random numbers, one per token."""
    logprobs: list[float] = field(default_factory=list)
    """The logprob of each sampled token."""
    top: int = 0
    """Number of most likely tokens to keep at each step."""
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    """For each sampled token, the most likely tokens in its place with their logprobs, best first."""
    slot: int = -1
    cached: int = 0
    """Number of leading tokens whose keys and values are in the slot."""
    shaper: Adjuster | None = None
    """Changes the model's distribution, if that is needed. Made here unless there is a constraint."""

    def __post_init__(self) -> None:
        if self.shaper is None and Adjuster.is_needed(self.sampling):
            self.shaper = Adjuster(self.sampling, self.ids)

    @property
    def pending(self) -> int:
        """Number of tokens that the model has not read yet."""
        return len(self.ids) - self.cached


def uniforms(key: int) -> Iterator[float]:
    """Return a request's own stream of uniform numbers in [0, 1)."""
    return iter(generator(key).random, 1.0)  # It never draws 1.


def append_samples(rows: Sequence[LiveRow], logits_BV: torch.Tensor) -> None:
    """Draw one token for each row from its logits. Raises EngineError if they are not finite."""
    size = len(rows) if logits_BV.is_cuda else max(1, _IN_CACHE // logits_BV.shape[1])
    for start in range(0, len(rows), size):
        _append_samples(rows[start : start + size], logits_BV[start : start + size])


def _append_samples(rows: Sequence[LiveRow], logits_BV: torch.Tensor) -> None:
    device = logits_BV.device
    uniform_B1 = copy_to_device(torch.tensor([[next(row.uniform)] for row in rows]), device)
    shapes = [None if row.shaper is None else row.shaper.shape() for row in rows]
    greedy = [row.sampling.temperature == 0 for row in rows]
    greedy_B1 = copy_to_device(torch.tensor(greedy)[:, None], device) if any(greedy) else None
    probs_BV = torch.softmax(adjust_logits(logits_BV, shapes), dim=-1)
    ids_B, logprobs_B = draw(probs_BV, uniform_B1, greedy_B1)
    append(rows, ids_B.tolist(), logprobs_B.tolist())
    for index, row in enumerate(rows):
        if row.top:
            best, tokens = probs_BV[index].topk(min(row.top, probs_BV.shape[1]))
            row.top_logprobs.append(tuple(zip(tokens.tolist(), best.log().tolist(), strict=True)))
    advance([(row.shaper, row.ids[-1]) for row in rows if row.shaper is not None], logits_BV.shape[1])


def draw(
    probs_BV: torch.Tensor, uniform_B1: torch.Tensor, greedy_B1: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token for each row, drawn by its uniform number or the likeliest, and its logprob, both [B].

    Inverse-CDF sampling uses one uniform number per token, so a row's draw depends on that row alone.
    """
    cdf_BV, best_B1 = probs_BV.cumsum(dim=-1), probs_BV.argmax(dim=-1, keepdim=True)
    # The product must not be rounded up to the total: there is no token past the end.
    threshold_B1 = uniform_B1.clamp(max=1 - 2**-23) * cdf_BV[:, -1:]
    # A search among NaN returns a place outside.
    ids_B1 = torch.searchsorted(cdf_BV, threshold_B1, right=True).clamp(0, probs_BV.shape[1] - 1)
    if greedy_B1 is not None:
        ids_B1 = torch.where(greedy_B1, best_B1, ids_B1)
    # A device that adds in parallel may round up at a token that has no mass.
    ids_B1 = torch.where(probs_BV.gather(1, ids_B1) > 0, ids_B1, best_B1)
    return ids_B1[:, 0], probs_BV.gather(1, ids_B1).log_()[:, 0]


def append(rows: Sequence[LiveRow], ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Append a drawn token to each row. Raises EngineError if a logprob is not a number."""
    if any(map(math.isnan, logprobs)):
        raise EngineError(
            "the model's logits are not finite: its weights are damaged, or overflow in its dtype"
        )
    for row, token, logprob in zip(rows, ids, logprobs, strict=True):
        row.ids.append(token)
        row.logprobs.append(logprob)
