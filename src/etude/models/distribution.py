"""The distribution that a token is drawn from, computed from logits, shared by sampling and learning.

The engine draws from it, and the learner computes it again for each sampled token, with a gradient. The
order is vLLM's: constraint, `min_tokens`, `logit_bias`, penalties, temperature, `min_p`, `top_k`, `top_p`.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from etude.core.call import Sampling

Bits: TypeAlias = np.ndarray
"""One bit per token of the vocabulary, lowest first, as uint32: set bits are allowed tokens."""
_Entries: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Distinct token ids, and a number for each."""

_LIKELIEST = 1024
"""Truncation first searches this many of the likeliest tokens."""
_PLAIN, _GREEDY = Sampling(), Sampling(temperature=0.0)
_NOTHING: _Entries = ((), ())


class Adjustment(NamedTuple):
    """The changes to the model's own distribution for one token."""

    sampling: Sampling = _PLAIN
    bias: _Entries = _NOTHING
    repeated: Sequence[int] = ()
    """Tokens under the repetition penalty."""
    penalties: _Entries = _NOTHING
    """Numbers that are added to the logits; negative for penalised tokens."""
    allowed: Bits | None = None
    barred: tuple[int, ...] = ()

    @property
    def temperature(self) -> float:
        """Temperature of the distribution that logprobs refer to: 1 for greedy answers."""
        return self.sampling.temperature or 1.0

    @property
    def is_tempered(self) -> bool:
        """Whether the shape is only a temperature."""
        moved = any(map(len, (self.bias[0], self.repeated, self.penalties[0], self.barred)))
        return not moved and self.allowed is None and not _cuts(self.sampling)


class Adjuster:
    """The shape of each token of an answer in turn, given the tokens before it."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        stop_ids: Collection[int] = (),
        matcher: Any = None,
        allowed: Bits | None = None,
    ) -> None:
        """`stop_ids` end the model's turns. `matcher` is llguidance's; `allowed` has its first tokens."""
        self.matcher = matcher
        self.fault = ""
        """Why the answer cannot continue."""
        self._sampling = sampling
        self._ends = tuple(sorted({*stop_ids, *sampling.stop_token_ids}))
        self._length = 0
        repeats = sampling.repetition_penalty != 1
        counts = sampling.frequency_penalty or sampling.presence_penalty
        self._seen = set(prompt) if repeats else None
        self._counts: Counter[int] | None = Counter() if counts else None
        self._bias = _entries(sampling.logit_bias) if sampling.logit_bias else _NOTHING
        self.allowed = allowed
        """The tokens that the grammar allows next."""
        self._constant = not (repeats or counts or sampling.min_tokens or matcher)
        self._last: Adjustment | None = None

    @classmethod
    def is_needed(cls, sampling: Sampling) -> bool:
        """Return whether a distribution differs from the softmax of the logits, as a greedy one does not."""
        return sampling.shape() not in (_PLAIN, _GREEDY)

    def take(self, token: int) -> None:
        """Add a sampled token. The caller then sets `allowed` to the tokens that the grammar allows next."""
        self._length += 1
        if self._seen is not None:
            self._seen.add(token)
        if self._counts is not None:
            self._counts[token] += 1

    def shape(self) -> Adjustment:
        """Return the shape of the next token."""
        if self._constant and self._last is not None:
            return self._last
        sampling, counts = self._sampling, self._counts
        allowed, barred = self.allowed, self._ends if self._length < sampling.min_tokens else ()
        if self.matcher is not None and self.matcher.is_error():
            self.fault = f"the answer cannot be held to its form any longer: {self.matcher.get_error()[:300]}"
            allowed = None
        if allowed is not None and barred:
            others = allowed.copy()
            tokens = np.asarray(barred)
            np.bitwise_and.at(others, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
            # If the grammar allows only the end, it takes precedence over `min_tokens`.
            allowed, barred = (others if others.any() else allowed), ()
        penalties = _NOTHING
        if counts:
            values = {
                token: -count * sampling.frequency_penalty - sampling.presence_penalty
                for token, count in counts.items()
            }
            penalties = _entries(values.items())
        seen = tuple(self._seen or ())
        self._last = Adjustment(sampling, self._bias, seen, penalties, allowed, barred)
        return self._last


def adjust_logits(
    logits_BV: Tensor, shapes: Sequence[Adjustment | None], kept_B: Tensor | None = None
) -> Tensor:
    """Return logits [B, V] in float32, with a gradient, whose softmax are the distributions of the shapes.

    Rows without a shape are unchanged, to the last bit. Tokens that cannot be drawn have minus infinity.
    The tokens `kept_B` were drawn, so truncation (top_k, top_p, min_p) never removes them.
    """
    logits_BV = logits_BV.float()
    rows = {row: shape for row, shape in enumerate(shapes) if shape is not None}
    if not rows:
        return logits_BV
    if len(rows) == len(shapes):
        return _adjust_rows(logits_BV, list(rows.values()), kept_B)
    index = torch.tensor(list(rows), device=logits_BV.device)
    kept = None if kept_B is None else kept_B[index]
    return logits_BV.index_copy(0, index, _adjust_rows(logits_BV[index], list(rows.values()), kept))


def _adjust_rows(logits_BV: Tensor, shapes: Sequence[Adjustment], kept_B: Tensor | None) -> Tensor:
    device = logits_BV.device
    if any(shape.allowed is not None or shape.barred for shape in shapes):
        logits_BV = torch.where(
            _find_allowed_tokens(shapes, logits_BV.shape[1]).to(device), logits_BV, -torch.inf
        )
    logits_BV = _add_adjustments(logits_BV, [shape.bias for shape in shapes], device)
    if any(len(shape.repeated) for shape in shapes):
        rows, tokens = _places([shape.repeated for shape in shapes], device)
        factors = torch.tensor([shape.sampling.repetition_penalty for shape in shapes], device=device)[rows]
        before = logits_BV[rows, tokens]
        after = torch.where(before > 0, before / factors, before * factors)
        logits_BV = logits_BV.index_put((rows, tokens), after)
    logits_BV = _add_adjustments(logits_BV, [shape.penalties for shape in shapes], device)
    temperatures = [shape.temperature for shape in shapes]
    if any(temperature != 1 for temperature in temperatures):
        logits_BV = logits_BV / torch.tensor(temperatures, device=device)[:, None]
    cut = [index for index, shape in enumerate(shapes) if _cuts(shape.sampling)]
    if not cut:
        return logits_BV
    rows = torch.tensor(cut, device=device)
    beyond = _find_removed_tokens(logits_BV.detach()[rows], [shapes[index].sampling for index in cut])
    if kept_B is not None:
        beyond = beyond.scatter(1, kept_B[rows][:, None], False)
    if len(cut) < len(shapes):
        beyond = torch.zeros_like(logits_BV, dtype=torch.bool).index_copy(0, rows, beyond)
    return logits_BV.masked_fill(beyond, -torch.inf)


def bitset_words(vocabulary: int) -> int:
    """Return the number of 32-bit words that hold one bit per token."""
    return -(-vocabulary // 32)


def _cuts(sampling: Sampling) -> bool:
    return bool(sampling.temperature) and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)


def _entries(values: Collection[tuple[int, float]]) -> _Entries:
    tokens, numbers = zip(*values, strict=True)
    return tokens, numbers


def _places(tokens: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows [N] and tokens [N] of all entries."""
    rows = [row for row, own in enumerate(tokens) for _ in own]
    return torch.tensor(rows, device=device), torch.tensor([*chain.from_iterable(tokens)], device=device)


def _add_adjustments(logits_BV: Tensor, entries: Sequence[_Entries], device: torch.device) -> Tensor:
    if not any(len(tokens) for tokens, _ in entries):
        return logits_BV
    places = _places([tokens for tokens, _ in entries], device)
    values = [*chain.from_iterable(values for _, values in entries)]
    return logits_BV.index_put(places, torch.tensor(values, device=device), accumulate=True)


def _find_allowed_tokens(shapes: Sequence[Adjustment], vocabulary: int) -> Tensor:
    """Return which tokens can be drawn [B, V]."""
    every = np.full(bitset_words(vocabulary), 0xFFFFFFFF, np.uint32)
    bits = np.stack([every if shape.allowed is None else shape.allowed for shape in shapes])
    numbers = np.unpackbits(bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
    allowed_BV = torch.from_numpy(numbers.view(np.bool_))
    for row, shape in enumerate(shapes):
        if shape.barred:
            allowed_BV[row, list(shape.barred)] = False
    return allowed_BV


def _find_removed_tokens(logits_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the tokens that `min_p`, `top_k` and `top_p` remove, in that order [B, V]. As in vLLM, none goes
    that is as likely as one that stays.

    The nucleus is the smallest set of tokens with the mass top_p (Holtzman et al., 2020).
    """
    vocabulary = logits_BV.shape[1]
    limits = [(each.min_p, min(each.top_k or vocabulary, vocabulary), each.top_p) for each in samplings]
    min_p_B1, top_k_B1, top_p_B1 = torch.tensor(limits, device=logits_BV.device).T[:, :, None]
    probs_BV = torch.softmax(logits_BV, dim=-1)
    # Sorting the whole vocabulary takes many times as long as computing its logits.
    fewer = min(max(_LIKELIEST, *(each.top_k for each in samplings)), vocabulary)
    for size in (fewer, vocabulary):
        ordered_BN = _largest(probs_BV, size)
        rank_N = torch.arange(size, device=logits_BV.device)
        least_B1 = min_p_B1 * ordered_BN[:, :1]
        kept_BN = (ordered_BN >= least_B1) & (rank_N < top_k_B1)
        ordered_BN = ordered_BN.masked_fill(~kept_BN, 0.0)
        possible_BV = probs_BV
        if any(each.min_p for each in samplings):
            possible_BV = probs_BV.masked_fill(probs_BV < least_B1, 0.0)
        possible_B1 = possible_BV.sum(dim=-1, keepdim=True)
        # Running sums do not depend on `size`, and so not on the other rows.
        running_BN = ordered_BN.cumsum(dim=-1)
        mass_B1 = torch.where(top_k_B1 < vocabulary, running_BN[:, -1:], possible_B1)
        before_BN = running_BN - ordered_BN
        # The likeliest token stays, even if top_p rounds to 0 in this precision.
        kept_BN &= (top_p_B1 >= 1) | (before_BN < top_p_B1 * mass_B1) | (rank_N == 0)
        if not bool(kept_BN[:, -1].any()):
            break
    return probs_BV < ordered_BN.gather(1, kept_BN.sum(dim=-1, keepdim=True) - 1)


def _largest(numbers_BV: Tensor, count: int) -> Tensor:
    """Return the largest numbers of each row in descending order [B, count]."""
    if numbers_BV.device.type != "cpu":
        return numbers_BV.topk(count).values
    # topk also sorts the indices, which takes up to twenty times as long.
    places = numbers_BV.shape[1] - count
    largest = np.partition(numbers_BV.numpy(), places, axis=1)[:, places:]
    return torch.from_numpy(np.sort(largest, axis=1)[:, ::-1].copy())
