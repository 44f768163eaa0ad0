"""Prefixes that rows share: which of them to read once for all rows of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from etude.core.sample import shared_length
from etude.inference.sampler import LiveRow

_PREFIX = 2**18
"""Numbers among a layer's keys and values that can be read in the time that a prefix's calls take."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Leading tokens that several rows share. The first row's keys and values are read for all."""

    rows: tuple[int, ...]
    length: int


def shared_prefixes(rows: Sequence[LiveRow], numbers: int) -> list[Prefix]:
    """Return the prefixes that save the most, at most one per row. This is fast if there are none.

    A token has `numbers` in a layer's keys and values.
    """
    if len(rows) < 2:
        return []
    least = _PREFIX // ((len(rows) - 1) * numbers) + 1
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row.cached >= least:
            alike[tuple(row.ids[:least])].append(index)
    found = list[Prefix]()
    for group in alike.values():
        if (len(group) - 1) * max(rows[index].cached for index in group) * numbers > _PREFIX:
            found += _best(rows, sorted(group, key=lambda index: rows[index].ids), numbers)
    return found


def _best(rows: Sequence[LiveRow], order: Sequence[int], numbers: int) -> list[Prefix]:
    """Return the best prefixes of sorted rows, among which rows that share a prefix are neighbours."""
    common = [shared_length(rows[one].ids, rows[other].ids) for one, other in pairwise(order)]
    saved, prefixes = [0], [list[Prefix]()]  # For each number of first rows: numbers saved, and how.
    for end in range(1, len(order) + 1):
        saved.append(saved[-1])
        first, most, length = end - 1, 0, rows[order[end - 1]].cached
        for start in range(end - 2, -1, -1):
            length = min(length, common[start], rows[order[start]].cached)
            gain = saved[start] + (end - start - 1) * length * numbers - _PREFIX
            if gain > saved[end]:
                saved[end], first, most = gain, start, length
        own = [Prefix(tuple(sorted(order[first:end])), most)] if most else []
        prefixes.append(prefixes[first] + own)
    return prefixes[-1]
