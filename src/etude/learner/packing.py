"""Which units of an optimiser step go through the model together, when shared tokens are computed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etude.learner.tree import Places, TokenTree


def packs(tree: TokenTree, units: Sequence[Sequence[Places]], token_budget: int) -> list[list[int]]:
    """Indices of `units` by pack; a pack has at most `token_budget` tokens of the tree.

    A unit is given as the paths of its sequences in `tree`. It is never split, and one above the budget
    takes along only units that are all in it. The largest subtrees that fit stay whole; a pack with a part of
    a larger one repeats what comes before it. Each subtree goes where the least room is left (best fit), of
    those packs that already have most of its tokens.
    """
    if units and len(tree) <= token_budget:
        return [list(range(len(units)))]
    packed: list[list[int]] = []
    held: list[np.ndarray] = []
    used: list[int] = []
    for piece, wanted in _pieces(tree, units, token_budget):
        costs = [len(wanted) - int(mask[wanted].sum()) for mask in held]
        fitting = [
            number for number, cost in enumerate(costs) if not cost or used[number] + cost <= token_budget
        ]
        if fitting:
            best = min(fitting, key=lambda number: (costs[number], -used[number]))
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
    tree: TokenTree, units: Sequence[Sequence[Places]], token_budget: int
) -> list[tuple[list[int], Places]]:
    """Units by the largest subtree that fits, and all of their tokens; the largest pieces first."""
    places = [np.unique(np.concatenate(unit)) for unit in units]
    pieces: dict[int, list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        path = max(unit, key=len)
        sizes = tree.ends[path] - path + tree.depths[path]
        fits = sizes <= token_budget
        pieces[int(path[fits.argmax()]) if fits.any() else -1 - index].append(index)
    result: list[tuple[list[int], Places]] = []
    for piece in pieces.values():
        together = np.unique(np.concatenate([places[index] for index in piece]))
        # Preferences may have a second sequence outside the subtree of their first.
        fits_together = len(together) <= token_budget
        result += [(piece, together)] if fits_together else [([index], places[index]) for index in piece]
    return sorted(result, key=lambda sized: (-len(sized[1]), sized[0]))


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
