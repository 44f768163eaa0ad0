"""Dealing an optimiser step to several processes, so that all have about as many tokens to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    found = _greedy(alone, after, high)
    return found + [(len(alone), len(alone))] * (count - len(found))


def _greedy(alone: Sequence[int], after: Sequence[int], most: int) -> list[tuple[int, int]]:
    """The fewest runs that cost no more than `most`."""
    found: list[tuple[int, int]] = []
    start, cost = 0, 0
    for index in range(len(alone)):
        cost = cost + after[index] if index > start else alone[index]
        if cost > most and index > start:
            found.append((start, index))
            start, cost = index, alone[index]
    return found + ([(start, len(alone))] if alone else [])
