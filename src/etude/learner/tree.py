"""Token trees: sequences that begin alike, with every token that they share once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Places: TypeAlias = npt.NDArray[np.int64]
"""Indices of a tree's tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Every distinct prefix of some sequences as one token, N in all.

    Tokens are in depth-first order: what comes before a token in its sequence comes before it here, and
    all that goes on from it is in one piece. So token k is before token q in some sequence, or is q,
    exactly if `k <= q < ends[k]`.
    """

    ids: Places
    """[N] token ids."""
    depths: Places
    """[N] how many tokens come before it in its sequences."""
    ends: Places
    """[N] one past the last token that goes on from it."""
    paths: tuple[Places, ...]
    """For each sequence, in the order given, where its tokens are. Per-token data of the sequences stay
    theirs: those that share a token may each have another advantage for it."""

    def __len__(self) -> int:
        return len(self.ids)

    def before(self, place: int) -> Places:
        """The places of the tokens that come before one in its sequences, from the first on."""
        earlier = np.arange(place)
        return earlier[self.ends[:place] > place]


def token_tree(sequences: Sequence[Sequence[int]]) -> TokenTree:
    """The tree of some sequences of token ids. Their order plays no part but in `paths`."""
    rows = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    order = sorted(range(len(rows)), key=lambda index: tuple(sequences[index]))
    paths: list[Places] = [np.empty(0, np.int64)] * len(rows)
    ids, depths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    ends = np.zeros(sum(map(len, rows)), np.int64)
    size, row, path = 0, np.empty(0, np.int64), np.empty(0, np.int64)
    for index in order:
        shared = common_prefix(row, rows[index])
        ends[path[shared:]] = size
        row, new = rows[index], len(rows[index]) - shared
        path = np.concatenate([path[:shared], np.arange(size, size + new)])
        ids.append(row[shared:])
        depths.append(np.arange(shared, len(row)))
        paths[index] = path
        size += new
    ends[path] = size
    return TokenTree(np.concatenate(ids), np.concatenate(depths), ends[:size], tuple(paths))


def common_prefix(one: Places, other: Places) -> int:
    """How many tokens two sequences have in common from the start."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
