"""Token trees: sequences that begin alike, with every shared token once. A model reads a tree as one row, and
the tree's layout tells which tokens attend to which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from etude.learner.kernels import block_mask, padded_size

Places: TypeAlias = npt.NDArray[np.int64]
"""Indices of a tree's tokens."""

_OWN = 96
"""Maximum queries of a block with a mask: fewer cost more calls, more compute more masked scores."""
_BACK = 1024
"""Maximum queries of a block without a mask."""
_SPAN = 512
"""Maximum tokens of a span. A longer one is cut as if it were several, so that most of its attention is in
blocks without a mask."""
_KEPT_SCORES = 1 << 22
"""Masks with this many scores in total are kept from layer to layer; larger ones are made again."""

Kernel: TypeAlias = Literal["blocks", "flex", "plain flex"]
"""How to compute attention: one call per block, which suits the CPU, or with FlexAttention. The plain version
of FlexAttention is for tests, and takes memory for all pairs of tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Every distinct prefix of some sequences as one token, N in total.

    Tokens are in depth-first order: the tokens before a token in its sequence precede it here, and all its
    continuations are contiguous. So token k is before token q in some sequence, or is q, exactly if
    `k <= q < ends[k]`.
    """

    ids: Places
    """Token ids, [N]."""
    depths: Places
    """How many tokens come before each token in its sequences, [N]."""
    ends: Places
    """One past the last continuation of each token, [N]."""
    paths: tuple[Places, ...]
    """For each sequence, in the given order, the places of its tokens. Per-token data stay with sequences:
    those that share a token may have different advantages for it."""

    def __len__(self) -> int:
        return len(self.ids)


def token_tree(sequences: Sequence[Sequence[int]]) -> TokenTree:
    """Return the tree of some sequences of token ids. Their order matters only for `paths`."""
    rows = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    order = sorted(range(len(rows)), key=lambda index: tuple(sequences[index]))
    paths: list[Places] = [np.empty(0, np.int64)] * len(rows)
    ids, depths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    ends = np.zeros(sum(map(len, rows)), np.int64)
    size, row, path = 0, np.empty(0, np.int64), np.empty(0, np.int64)
    for index in order:
        length = min(len(row), len(rows[index]))
        differs = row[:length] != rows[index][:length]
        shared = int(differs.argmax()) if differs.any() else length
        ends[path[shared:]] = size
        row, new = rows[index], len(rows[index]) - shared
        path = np.concatenate([path[:shared], np.arange(size, size + new)])
        ids.append(row[shared:])
        depths.append(np.arange(shared, len(row)))
        paths[index] = path
        size += new
    ends[path] = size
    return TokenTree(np.concatenate(ids), np.concatenate(depths), ends[:size], tuple(paths))


@dataclass(frozen=True, slots=True)
class Block:
    """Queries from `start` to `stop`, and keys at the places from `low` to `high`."""

    start: int
    stop: int
    low: int
    high: int
    known: int
    """How many of its first keys are seen by all of its queries."""

    @property
    def queries(self) -> slice:
        """The places of its queries."""
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        """The tree's tokens that are its keys."""
        return slice(self.low, self.high)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of queries, and the number of keys."""
        return self.stop - self.start, self.high - self.low


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Some of a tree's tokens, and the keys that they attend to, block by block.

    All continuations of a token are contiguous. So the tokens after a span without branches form one block
    with it. They see the whole span: the block needs no mask, and its keys no copy. The other blocks are the
    spans themselves, and subtrees so small that cutting them does not pay.
    """

    places_Q: torch.Tensor
    """Places of the queries, in rising order."""
    own: tuple[Block, ...]
    """Each query with the tokens of its span or its subtree, some of which it may not see."""
    back: tuple[Block, ...]
    """Queries with an earlier span, all of which they see."""
    own_scores: int
    back_scores: int
    """Total number of scores in the blocks."""

    @classmethod
    def of(cls, tree: TokenTree, places: Places, device: torch.device, most: int | None) -> Queries:
        """Make the queries at `places`, in rising order. Masked blocks have up to `most`; None: no blocks."""
        blocks = [] if most is None else list(_blocks(tree, places, most))
        own = tuple(block for block in blocks if block.high > places[block.start])
        back = tuple(block for block in blocks if block.high <= places[block.start])
        scores = (sum(math.prod(block.shape) for block in part) for part in (own, back))
        return cls(torch.from_numpy(places).to(device), own, back, *scores)


@dataclass(slots=True, eq=False)
class TreeLayout:
    """How the N tokens of a forward pass attend to each other; the model receives it as `tree=`.

    For FlexAttention, N is more than the tree's tokens: tokens without a parent pad its last block.
    """

    depths_N: torch.Tensor
    ends_N: torch.Tensor
    depth: int
    """The greatest depth."""
    kernel: Kernel
    all: Queries
    last: Queries
    """Queries of the last layer, where only tokens that precede a choice matter."""
    windows: list[int | None] = field(default_factory=list)
    """The sliding window of each attention that was computed."""
    _masks: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tree: TokenTree,
        device: torch.device,
        needed: Places,
        most: int = _OWN,
        kernel: Kernel | None = None,
    ) -> TreeLayout:
        """Return the layout of a tree with at least one token.

        `needed` are the places, in rising order, whose last hidden states are needed.
        """
        kernel = kernel or ("flex" if device.type == "cuda" else "blocks")
        size, cut = len(tree), kernel == "blocks"
        # Padding attends only to itself.
        more = 0 if cut else padded_size(size) - size
        depths = torch.from_numpy(np.pad(tree.depths, (0, more))).to(device)
        ends = torch.from_numpy(np.concatenate([tree.ends, np.arange(size, size + more) + 1])).to(device)
        every = Queries.of(tree, np.arange(size), device, most if cut else None)
        last = every if len(needed) == size else Queries.of(tree, needed, device, most if cut else None)
        return cls(depths, ends, int(tree.depths.max()), kernel, every, last)

    def binding(self, sliding_window: int | None) -> int | None:
        """Return the window, if any token is too deep to see its sequence's first token; else None."""
        binds = sliding_window is not None and self.depth >= sliding_window
        return sliding_window if binds else None

    def attends(self, query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return whether the tokens at `query` attend to those at `key`; the two broadcast."""
        seen = (key <= query) & (query < self.ends_N[key])
        return seen if window is None else seen & (self.depths_N[query] - self.depths_N[key] < window)

    def mask(
        self, queries: Queries, block: Block, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return a tensor [queries, keys] to add to the scores of a block: 0, or minus infinity.

        Returns None if all of its queries see all of its keys.
        """
        if window is None and block.known == block.high - block.low:
            return None
        name = queries is self.last, block, window, dtype
        if name in self._masks:
            return self._masks[name]  # type: ignore[no-any-return]
        query_Q1, known = queries.places_Q[block.queries, None], 0 if window else block.known
        keys = torch.arange(block.low + known, block.high, device=self.ends_N.device)
        mask = torch.zeros(block.shape, device=keys.device, dtype=dtype)
        mask[:, known:] = torch.where(self.attends(query_Q1, keys, window), 0.0, float("-inf"))
        if self.all.own_scores + (self.all.back_scores if window else 0) <= _KEPT_SCORES:
            self._masks[name] = mask
        return mask

    def block_mask(self, window: int | None) -> Any:
        """Return the same as a block mask of FlexAttention."""
        name = "blocks", window
        if name not in self._masks:
            self._masks[name] = block_mask(self.ends_N, self.depths_N, window)
        return self._masks[name]


def _blocks(tree: TokenTree, places: Places, most: int) -> Iterator[Block]:
    """Yield the blocks of queries at `places`."""
    turns = np.flatnonzero(np.diff(tree.ends)) + 1
    left = [(0, len(tree))]
    while left:
        start, end = left.pop()
        while start < end:
            stop = start  # The end of the subtrees that have at most `most` tokens together.
            while stop < end and tree.ends[stop] - start <= most:
                stop = int(tree.ends[stop])
            if stop > start:
                yield from _cut(tree, places, start, stop, most)
                start = stop
                continue
            after = int(tree.ends[start])
            turn = np.searchsorted(turns, start, side="right")
            stop = min(int(turns[turn]), after) if turn < len(turns) else after
            stop = min(stop, start + _SPAN)
            yield from _cut(tree, places, start, stop, most)
            yield from _cut(tree, places, stop, after, _BACK, (start, stop))
            left.append((stop, after))
            start = after


def _cut(
    tree: TokenTree, places: Places, start: int, stop: int, most: int, span: tuple[int, int] | None = None
) -> Iterator[Block]:
    """Yield the tokens of a range as queries of an earlier span, or else of the range itself."""
    first, last = np.searchsorted(places, [start, stop]).tolist()
    for at in range(first, last, most):
        to = min(at + most, last)
        low, high = span or (start, int(places[to - 1]) + 1)
        known = np.count_nonzero(tree.ends[low : places[at] + 1] >= high) if span is None else high - low
        yield Block(at, to, low, high, int(known))
