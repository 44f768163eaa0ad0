"""Token trees: sequences that begin alike, with every shared token once. A model reads a tree as one row, and
the tree's layout tells which tokens attend to which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

Places: TypeAlias = npt.NDArray[np.int64]
"""Indices of a tree's tokens."""

_QUERIES = 64
"""Queries of a chunk: more compute more hidden scores, and fewer make the products slower."""
_SCORES = 1 << 16
"""Maximum scores of a head in chunks that are computed together, so that they stay in a CPU's cache."""
_SCORES_ON_GPU = 1 << 22
"""The same on a GPU, where more calls cost more than the cache saves."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """C chunks of Q queries each, and for each chunk the up to K tokens that one of its queries sees."""

    queries: slice
    """The range of queries in these chunks, in order."""
    query_CQ: torch.Tensor
    """The places of the queries in the tree."""
    key_CK: torch.Tensor
    """The places of the keys, and -1 where a chunk has fewer."""
    seen_U: torch.Tensor
    """The places of all keys, each once."""
    order_E: torch.Tensor
    """The entries of `key_CK`, flattened, by place."""
    first_U: torch.Tensor
    """Where in `order_E` the entries of each place of `seen_U` begin."""

    @classmethod
    def build(cls, places: Places, start: int, keys: Sequence[Places], device: torch.device) -> Chunks:
        """Return chunks of equal size of the queries at `places`, from the query `start` on."""
        key_CK = np.full((len(keys), max(map(len, keys))), -1)
        for row, own in zip(key_CK, keys, strict=True):
            row[: len(own)] = own
        order = np.argsort(key_CK, axis=None, kind="stable")[np.count_nonzero(key_CK < 0) :]
        seen, first = np.unique(key_CK.flat[order], return_index=True)
        query_CQ = places.reshape(len(keys), -1)
        arrays = query_CQ, key_CK, seen, order, first
        return cls(
            slice(start, start + query_CQ.size), *(torch.from_numpy(each).to(device) for each in arrays)
        )

    def take_keys(self, x_NGD: torch.Tensor) -> torch.Tensor:
        """Return the numbers of each chunk's keys [C * G, K, D], of a tensor that has them for all tokens."""
        taken = x_NGD.flatten(1).index_select(0, self.key_CK.clamp(min=0).flatten())
        return taken.view(*self.key_CK.shape, *x_NGD.shape[1:]).transpose(1, 2).flatten(0, 1)

    def add_keys(self, total_NGD: torch.Tensor, x_BKD: torch.Tensor) -> None:
        """Add numbers of each chunk's keys [C * G, K, D] to their tokens' in the contiguous `total_NGD`."""
        groups, width = total_NGD.shape[1:]
        x_CGKD = x_BKD.view(-1, groups, *x_BKD.shape[1:])
        x_EX = x_CGKD.transpose(1, 2).reshape(-1, groups * width)
        sums_UX = functional.embedding_bag(self.order_E, x_EX, self.first_U, mode="sum")
        total_NGD.view(len(total_NGD), -1).index_add_(0, self.seen_U, sums_UX)


class Queries:
    """Some of a tree's tokens, and the tokens that they attend to, chunk by chunk."""

    def __init__(self, tree: TokenTree, places: Places, device: torch.device) -> None:
        """`places` are the queries', in rising order."""
        self.places_Q = torch.from_numpy(places).to(device)
        self._tree, self._places = tree, places

    @cached_property
    def chunks(self) -> tuple[Chunks, ...]:
        """All queries, in order. Chunks with about as many keys are together."""
        found, run, start, places = list[Chunks](), list[Places](), 0, self._places
        most = _SCORES_ON_GPU if self.places_Q.is_cuda else _SCORES
        for at in range(0, len(places), _QUERIES):
            own = places[at : at + _QUERIES]
            # All tokens that one of the queries attends to.
            tokens = np.arange(own[-1] + 1)
            next_query = own[np.searchsorted(own, tokens)]
            keys = np.flatnonzero(next_query < self._tree.ends[tokens])
            longest = max(map(len, [*run, keys]))
            size, total = (len(run) + 1) * longest, sum(map(len, run)) + len(keys)
            if run and (len(own) < _QUERIES or size * _QUERIES > most or size > 1.25 * total):
                found.append(Chunks.build(places[start:at], start, run, self.places_Q.device))
                run, start = [], at
            run.append(keys)
        return *found, Chunks.build(places[start:], start, run, self.places_Q.device)

    @cached_property
    def scores(self) -> int:
        """Total number of a head's scores."""
        return sum(each.query_CQ.numel() * each.key_CK.shape[1] for each in self.chunks)


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
    _masks: dict[tuple[Chunks, int | None], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, tree: TokenTree, device: torch.device, needed: Places) -> TreeLayout:
        """Return the layout of a tree with at least one token.

        `needed` are the places, in rising order, whose last hidden states are needed.
        """
        depths, ends = (torch.from_numpy(each).to(device) for each in (tree.depths, tree.ends))
        every = Queries(tree, np.arange(len(tree)), device)
        last = every if len(needed) == len(tree) else Queries(tree, needed, device)
        return cls(tree, depths, ends, every, last)

    @cached_property
    def depth(self) -> int:
        """The greatest depth."""
        return int(self.tree.depths.max())

    @cached_property
    def levels(self) -> list[Level]:
        """The same as the chunks of all queries, for kernels that take many ranges at a time."""
        return make_levels(self.tree, self.depths_N.device)

    def binding(self, sliding_window: int | None) -> int | None:
        """Return the window, if any token is too deep to see its sequence's first token; else None."""
        binds = sliding_window is not None and self.depth >= sliding_window
        return sliding_window if binds else None

    def attends(self, query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return whether the tokens at `query` attend to those at `key`; the two broadcast."""
        seen = (key <= query) & (query < self.ends_N[key])
        return seen if window is None else seen & (self.depths_N[query] - self.depths_N[key] < window)

    def mask(self, chunks: Chunks, window: int | None) -> torch.Tensor:
        """Return a tensor [C, 1, Q, 1, K] to add to the scores of chunks: 0, or minus infinity."""
        if (chunks, window) in self._masks:
            return self._masks[chunks, window]
        key_C1K = chunks.key_CK[:, None]
        seen_CQK = self.attends(chunks.query_CQ[:, :, None], key_C1K, window) & (key_C1K >= 0)
        mask = torch.where(seen_CQK, 0.0, float("-inf"))[:, None, :, None]
        if self.all.scores <= _KEPT_SCORES:
            self._masks[chunks, window] = mask
        return mask
