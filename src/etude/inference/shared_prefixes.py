"""Plans what rows that add a token read: shared prefixes once, the rest of each beside its neighbours'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from etude.inference.kv_slots import SlotLayer, span_of
from etude.inference.slot_table import shared_length

_PREFIX = 2**18
"""Numbers among a layer's keys and values that are read in the time that the calls for a prefix take."""
_RUN = 2**16
"""The same for the calls for neighbours that attend together."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Leading tokens that several rows have in common. What the first of these holds is read for all."""

    rows: tuple[int, ...]
    length: int

    def keys_and_values(self, held: SlotLayer, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, H, length, D], of rows in these slots."""
        slot = slots[self.rows[0]]
        return held.of(slice(slot, slot + 1), self.length)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours that attend together, to columns from `start` to before `end`.

    `start` is 0 where they have no prefix. All others have one, whose last column is `start` or a later one:
    the score of the whole prefix takes its place.
    """

    rows: slice
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """How many are read, those included that are not looked at."""
        return len(range(self.rows.start, self.rows.stop)) * (self.end - self.start)

    def keys_and_values(self, held: SlotLayer, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, H, end - start, D], of rows in these slots."""
        own = slots[self.rows]
        keys, values = held.of(slice(own[0], own[-1] + 1), self.end)
        return keys[:, :, self.start :], values[:, :, self.start :]


@dataclass(frozen=True, slots=True)
class Reading:
    """The plan of rows that add a token."""

    slots: Sequence[int]
    """Those of the rows."""
    prefixes: list[Prefix]
    runs: list[Run]

    def cost(self, numbers: int) -> int:
        """In numbers that could be read in that time, where a token has so many in a layer."""
        tokens = sum(run.tokens for run in self.runs) + sum(prefix.length for prefix in self.prefixes)
        return tokens * numbers + _PREFIX * len(self.prefixes) + _RUN * len(self.runs)


def plan_of(ids: Sequence[list[int]], cached: Sequence[int], slots: Sequence[int], numbers: int) -> Reading:
    """For rows that hold as many leading tokens in slots, in the order of these, and add one.

    A token has so many `numbers` among the keys and values of a layer.
    """
    alone = Reading(slots, [], _runs([0] * len(cached), cached, slots, numbers))
    prefixes = shared_prefixes(ids, cached, numbers)
    if not prefixes:
        return alone
    starts = [0] * len(cached)
    for prefix in prefixes:
        for row in prefix.rows:
            starts[row] = prefix.length
    shared = Reading(slots, prefixes, _runs(starts, cached, slots, numbers))
    return min(shared, alone, key=lambda one: one.cost(numbers))


def shared_prefixes(ids: Sequence[list[int]], cached: Sequence[int], numbers: int) -> list[Prefix]:
    """Those that save the most; a row has at most one. Takes little time where there are none."""
    if len(ids) < 2:
        return []
    least = _PREFIX // ((len(ids) - 1) * numbers) + 2  # Of one column alone `Run.start` could not tell.
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, length in enumerate(cached):
        if length >= least:
            alike[tuple(ids[row][:least])].append(row)
    found = list[Prefix]()
    for rows in alike.values():
        if (len(rows) - 1) * max(cached[row] for row in rows) * numbers > _PREFIX:
            found += _best(ids, cached, numbers, sorted(rows, key=ids.__getitem__))
    return found


def _best(ids: Sequence[list[int]], cached: Sequence[int], numbers: int, rows: Sequence[int]) -> list[Prefix]:
    """Of rows that are sorted, so that those who share a prefix are neighbours."""
    common = [
        min(cached[one], cached[other], shared_length(ids[one], ids[other])) for one, other in pairwise(rows)
    ]
    saved, prefixes = [0], [list[Prefix]()]  # By the first rows alone, so many.
    for end in range(1, len(rows) + 1):
        saved.append(saved[-1])
        first, most, length = end - 1, 0, cached[rows[end - 1]]
        for start in range(end - 2, -1, -1):
            length = min(length, common[start])
            gain = saved[start] + (end - start - 1) * length * numbers - _PREFIX
            if gain > saved[end]:
                saved[end], first, most = gain, start, length
        own = [Prefix(tuple(sorted(rows[first:end])), most)] if most else []
        prefixes.append(prefixes[first] + own)
    return prefixes[-1]


def _runs(starts: Sequence[int], cached: Sequence[int], slots: Sequence[int], numbers: int) -> list[Run]:
    """Neighbours together as long as columns that some of them have no use for take less time than calls."""
    longest = max(cached) + 1
    left = span_of(longest) - longest
    runs = list[Run]()
    first, low, high = 0, max(starts[0] - 1, 0), cached[0] + 1 + left
    for row in range(1, len(cached)):
        start, end = max(starts[row] - 1, 0), cached[row] + 1 + left
        lowest, highest = min(low, start), max(high, end)
        more = (row - first) * (highest - lowest - high + low) + highest - lowest - end + start
        is_next = slots[row] == slots[row - 1] + 1
        if is_next and (low > 0) == (start > 0) and more * numbers <= _RUN:
            low, high = lowest, highest
        else:
            runs.append(Run(slice(first, row), low, high))
            first, low, high = row, start, end
    return [*runs, Run(slice(first, len(cached)), low, high)]
