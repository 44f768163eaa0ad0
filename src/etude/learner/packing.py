"""Which units of an optimiser step go through the model together, when shared tokens are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etude.learner.tree import Places, TokenTree


def packs(tree: TokenTree, units: Sequence[Sequence[Places]], token_budget: int) -> list[list[int]]:
    """Indices of `units` by pack; a pack has at most `token_budget` tokens of the tree.

    A unit is given as the paths of its sequences in `tree`. It is never split, and one above the budget
    goes alone. The largest subtrees that fit stay whole; a pack with a part of a larger one repeats what
    comes before it. Each subtree goes where the least room is left (best fit), of those packs that already
    have most of its tokens.
    """
    if units and len(tree) <= token_budget:
        return [list(range(len(units)))]
    places = [np.unique(np.concatenate(unit)) for unit in units]
    packed: list[list[int]] = []
    held: list[np.ndarray] = []
    used: list[int] = []
    for piece in _pieces(tree, units, places, token_budget):
        wanted = np.unique(np.concatenate([places[index] for index in piece]))
        costs = [len(wanted) - int(mask[wanted].sum()) for mask in held]
        room = [token_budget - size - cost for size, cost in zip(used, costs, strict=True)]
        fitting = [number for number in range(len(packed)) if room[number] >= 0]
        if fitting:
            best = min(fitting, key=lambda number: (costs[number], room[number]))
        else:
            best = len(packed)
            packed.append([])
            held.append(np.zeros(len(tree), dtype=bool))
            used.append(0)
            costs.append(len(wanted))
        packed[best] += piece
        held[best][wanted] = True
        used[best] += costs[best]
    return [sorted(pack) for pack in packed]


def _pieces(
    tree: TokenTree, units: Sequence[Sequence[Places]], places: Sequence[Places], token_budget: int
) -> list[list[int]]:
    """Units by the largest subtree that fits, with what comes before it; the largest pieces first."""
    pieces: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        path = max(unit, key=len)
        sizes = tree.ends[path] - path + tree.depths[path]
        fits = sizes <= token_budget
        key = int(path[fits.argmax()]) if fits.any() else -1 - index
        pieces.setdefault(key, []).append(index)
    result: list[tuple[int, list[int]]] = []
    for piece in pieces.values():
        size = len(np.unique(np.concatenate([places[index] for index in piece])))
        # Preferences may have a second sequence outside the subtree of their first.
        fits_together = size <= token_budget
        result += [(size, piece)] if fits_together else [(len(places[index]), [index]) for index in piece]
    return [piece for _, piece in sorted(result, key=lambda sized: (-sized[0], sized[1]))]


@dataclass(frozen=True, slots=True)
class Row:
    """The units of a step in a row, in which those that have much in common are neighbours."""

    order: tuple[int, ...]
    """Indices of the units."""
    alone: tuple[int, ...]
    """Tokens that each costs, in that order."""
    after: tuple[int, ...]
    """Tokens that each costs when the one before it is computed along with it."""

    def part(self, rank: int, ranks: int) -> list[int]:
        """The indices of the units that a process computes, in rising order."""
        start, stop = runs(self.alone, self.after, ranks)[rank]
        return sorted(self.order[start:stop])


def runs(alone: Sequence[int], after: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a row into `count` runs, so that the costliest is as cheap as can be; `(start, stop)` of each.

    A run costs `alone` of its first unit and `after`, which is no more, of all others. There are empty
    runs at the end when there are too few units.
    """
    low, high = max(alone, default=0), sum(alone)
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(alone, after, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    parts = _greedy(alone, after, high)
    return parts + [(len(alone), len(alone))] * (count - len(parts))


def _greedy(alone: Sequence[int], after: Sequence[int], most: int) -> list[tuple[int, int]]:
    """The fewest runs that cost no more than `most`."""
    parts: list[tuple[int, int]] = []
    start, cost = 0, 0
    for index in range(len(alone)):
        cost = cost + after[index] if index > start else alone[index]
        if cost > most and index > start:
            parts.append((start, index))
            start, cost = index, alone[index]
    return parts + ([(start, len(alone))] if alone else [])
