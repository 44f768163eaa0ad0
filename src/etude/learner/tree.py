"""Token trees: sequences that begin alike, with every shared token once. A model reads a tree as one row, and
the tree's layout tells which tokens attend to which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

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


class Queries:
    """Some of a tree's tokens, and the keys that they attend to, block by block.

    All continuations of a token are contiguous. So the tokens after a span without branches form one block
    with it. They see the whole span: the block needs no mask, and its keys no copy. The other blocks are the
    spans themselves, and subtrees so small that cutting them does not pay.
    """

    def __init__(self, tree: TokenTree, places: Places, device: torch.device, most: int) -> None:
        """`places` are the queries', in rising order. Masked blocks have up to `most`."""
        self.places_Q = torch.from_numpy(places).to(device)
        self._cut = tree, places, most

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks."""
        return tuple(_blocks(*self._cut))

    @cached_property
    def own(self) -> tuple[Block, ...]:
        """Each query with the tokens of its span or its subtree, some of which it may not see."""
        return tuple(block for block in self.blocks if block.high > self._cut[1][block.start])

    @cached_property
    def back(self) -> tuple[Block, ...]:
        """Queries with an earlier span, all of which they see."""
        return tuple(block for block in self.blocks if block.high <= self._cut[1][block.start])

    @cached_property
    def scores(self) -> tuple[int, int]:
        """Total number of scores in the blocks of `own`, and in `back`'s."""
        own, back = (sum(math.prod(block.shape) for block in part) for part in (self.own, self.back))
        return own, back


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Ranges of queries, each of which sees a range of keys: all of it, or all up to itself."""

    queries_Q: torch.Tensor | None
    keys_K: torch.Tensor | None
    """Places in the tree; None for all tokens."""
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    """Where the ranges begin among these places, and where the last one ends, int32."""
    longest: tuple[int, int]
    """The longest ranges of queries and of keys."""


def make_levels(tree: TokenTree, device: torch.device) -> list[Level]:
    """Return levels that together have every pair of a token and one that it sees, once.

    In the first, tokens see their own span without branches up to themselves. In the others, the tokens after
    a span see all of it. Spans with the same number of spans before them share a level.
    """
    starts = np.flatnonzero(np.diff(tree.ends, prepend=-1))
    stops, after = np.append(starts[1:], len(tree)), tree.ends[starts]
    ends = _ends(starts, stops, device)
    longest = int((stops - starts).max())
    levels, open_ends = [Level(None, None, ends, ends, (longest, longest))], list[int]()
    spans: list[list[int]] = []
    for index, (start, end) in enumerate(zip(starts.tolist(), after.tolist(), strict=True)):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if end > stops[index]:
            if len(spans) == len(open_ends):
                spans.append([])
            spans[len(open_ends)].append(index)
        open_ends.append(end)
    for found in spans:
        ranges = [(stops[found], after[found]), (starts[found], stops[found])]
        places = [
            torch.from_numpy(np.concatenate([np.arange(*one) for one in zip(*each, strict=True)])).to(device)
            for each in ranges
        ]
        most = [int((high - low).max()) for low, high in ranges]
        cuts = [_ends(*each, device) for each in ranges]
        levels.append(Level(places[0], places[1], cuts[0], cuts[1], (most[0], most[1])))
    return levels


def _ends(starts: Places, stops: Places, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.cumsum(np.append(0, stops - starts)).astype(np.int32)).to(device)


@dataclass(eq=False)
class TreeLayout:
    """How the N tokens of a forward pass attend to each other; the model receives it as `tree=`."""

    tree: TokenTree
    depths_N: torch.Tensor
    ends_N: torch.Tensor
    all: Queries
    last: Queries
    """Queries of the last layer, where only tokens that precede a choice matter."""
    windows: list[int | None] = field(default_factory=list)
    """The sliding window of each attention that was computed."""
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, tree: TokenTree, device: torch.device, needed: Places, most: int = _OWN) -> TreeLayout:
        """Return the layout of a tree with at least one token.

        `needed` are the places, in rising order, whose last hidden states are needed.
        """
        depths, ends = (torch.from_numpy(each).to(device) for each in (tree.depths, tree.ends))
        every = Queries(tree, np.arange(len(tree)), device, most)
        last = every if len(needed) == len(tree) else Queries(tree, needed, device, most)
        return cls(tree, depths, ends, every, last)

    @cached_property
    def depth(self) -> int:
        """The greatest depth."""
        return int(self.tree.depths.max())

    @cached_property
    def levels(self) -> list[Level]:
        """The same as the blocks of all queries, for kernels that take many ranges at a time."""
        return make_levels(self.tree, self.depths_N.device)

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
            return self._masks[name]
        query_Q1, known = queries.places_Q[block.queries, None], 0 if window else block.known
        keys = torch.arange(block.low + known, block.high, device=self.ends_N.device)
        mask = torch.zeros(block.shape, device=keys.device, dtype=dtype)
        mask[:, known:] = torch.where(self.attends(query_Q1, keys, window), 0.0, float("-inf"))
        own, back = self.all.scores
        if own + (back if window else 0) <= _KEPT_SCORES:
            self._masks[name] = mask
        return mask


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
