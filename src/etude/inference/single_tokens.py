"""Steps that add one token to each row. Fixed tensors are made once, and shared prefixes are read once.

The queries of all rows with a common prefix attend to it together, with one row's keys and values. The result
then counts as one more column in each row's own attention. The column's score is the log-sum-exp of the
prefix's scores, and its value is the weighted average of the prefix's values. One softmax covers both parts,
and the result is exact up to rounding. In bfloat16, stored scores would be rounded, so each part has its own
softmax. The two results are then averaged in float32, weighted by their sums of exponentials.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy
import torch

from etude.core.sample import shared_length
from etude.inference.fused_llama import FusedLlama, Scratch, as_batch, attend, flash_attention
from etude.inference.kv_slots import KvSlots, SlotLayer, rounded_up, tensor
from etude.inference.sampler import LiveRow

_PREFIX = 2**18
"""Numbers among a layer's keys and values that can be read in the time that a prefix's calls take."""
_RUN = 2**16
"""The same for the calls of neighbours that attend together."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Leading tokens that several rows share. The first row's keys and values are read for all."""

    rows: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours that attend together, to columns from `start` up to but not including `end`.

    `start` is 0 if they have no prefix. Otherwise all have one, and its last column is `start` or later. The
    score of the whole prefix takes the place of that column.
    """

    rows: slice
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """The plan of a step for rows that add one token each."""

    slots: Sequence[int]
    """The slots of the rows."""
    prefixes: list[Prefix]
    runs: list[Run]

    def cost(self, numbers: int) -> int:
        """Return the cost of the step as numbers read per layer; a token has `numbers` of them."""
        # Columns that are read but masked count too.
        own: int = sum((run.rows.stop - run.rows.start) * (run.end - run.start) for run in self.runs)
        tokens = own + sum(prefix.length for prefix in self.prefixes)
        return tokens * numbers + _PREFIX * len(self.prefixes) + _RUN * len(self.runs)


def plan_reading(
    ids: Sequence[list[int]], cached: Sequence[int], slots: Sequence[int], numbers: int
) -> ReadingPlan:
    """Return the cheaper plan, with or without shared prefixes, for rows that add one token each.

    Rows are in slot order, with `cached` tokens each. A token has `numbers` in a layer's keys and values.
    """
    alone = ReadingPlan(slots, [], _runs([0] * len(cached), cached, slots, numbers))
    prefixes = shared_prefixes(ids, cached, numbers)
    if not prefixes:
        return alone
    starts = [0] * len(cached)
    for prefix in prefixes:
        for row in prefix.rows:
            starts[row] = prefix.length
    shared = ReadingPlan(slots, prefixes, _runs(starts, cached, slots, numbers))
    return min(shared, alone, key=lambda one: one.cost(numbers))


def shared_prefixes(ids: Sequence[list[int]], cached: Sequence[int], numbers: int) -> list[Prefix]:
    """Return the prefixes that save the most, at most one per row. This is fast if there are none."""
    if len(ids) < 2:
        return []
    least = _PREFIX // ((len(ids) - 1) * numbers) + 2  # `Run.start` cannot express a prefix of one column.
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
    """Return the best prefixes of sorted rows, among which rows that share a prefix are neighbours."""
    common = [
        min(cached[one], cached[other], shared_length(ids[one], ids[other])) for one, other in pairwise(rows)
    ]
    saved, prefixes = [0], [list[Prefix]()]  # For each number of first rows: numbers saved, and how.
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
    """Join neighbours into runs as long as their unused columns take less time than separate calls."""
    longest = max(cached) + 1
    left = rounded_up(longest) - longest
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


Held: TypeAlias = tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]
"""A layer's keys and values: of each prefix, and of each run."""


class SplitAttention:
    """Attention that follows a plan, for rows with a room for themselves. Its tensors are made once."""

    def __init__(self, model: FusedLlama, room: Scratch, plan: ReadingPlan) -> None:
        self._plan, self._room, self._scale = plan, room, model.scale
        self._columns = torch.arange(max(run.end for run in plan.runs))
        self._hide = torch.tensor(torch.finfo(model.dtype).min, dtype=model.dtype)
        self._mask_MS = torch.empty(len(room.query), len(self._columns), dtype=model.dtype)
        self._prefixes = _Prefixes(model, room, plan.prefixes) if plan.prefixes else None
        self._own = [_Own(room, self._mask_MS, run, self._prefixes) for run in plan.runs]

    def held(self, layer: SlotLayer) -> Held:
        """Return the keys and values of a layer that the plan reads."""
        slots, runs = self._plan.slots, []
        first = [(slots[prefix.rows[0]], prefix.length) for prefix in self._plan.prefixes]
        for run in self._plan.runs:
            own = slots[run.rows]
            keys, values = layer.of(slice(own[0], own[-1] + 1), run.end)
            runs.append(as_batch(keys[:, :, run.start :], values[:, :, run.start :]))
        return [layer.of(slice(slot, slot + 1), length) for slot, length in first], runs

    def look(self, position_M1: torch.Tensor) -> None:
        """Mask all columns after these positions, given for each row and group of heads."""
        is_hidden_MS = self._columns > position_M1
        if self._prefixes is not None:
            is_hidden_MS |= self._columns < self._prefixes.column_M1
        torch.mul(is_hidden_MS, self._hide, out=self._mask_MS)

    def look_at(self, position_M1: torch.Tensor) -> None:
        """Unmask these positions too."""
        self._mask_MS.scatter_(1, position_M1, 0.0)

    def __call__(self, held: Held) -> None:
        """Attend to a layer's keys and values."""
        shared, own = held
        if self._prefixes is not None:
            self._prefixes.attend(self._room.query, shared)
        for run, read in zip(self._own, own, strict=True):
            run.attend(*read, self._scale)
        if self._prefixes is not None:
            self._prefixes.add(self._room.mixed_by_group)


def one_pass(
    model: FusedLlama, plan: ReadingPlan, positions: Sequence[int], room: Scratch
) -> Callable[[SlotLayer], None]:
    """Return attention for one pass of tokens at these positions, in the first places of a room."""
    attend_to = SplitAttention(model, room.first(len(positions)), plan)
    attend_to.look(tensor(positions).repeat_interleave(model.groups)[:, None])
    return lambda layer: attend_to(attend_to.held(layer))


class _Prefixes:
    """Attention to the prefixes, for all rows that have one."""

    def __init__(self, model: FusedLlama, room: Scratch, prefixes: Sequence[Prefix]) -> None:
        self._groups, self._scale = model.groups, model.scale
        self._rows = [tensor(prefix.rows) for prefix in prefixes]
        head_G1 = torch.arange(model.groups)[:, None]
        places = [(rows * model.groups + head_G1).flatten() for rows in self._rows]
        self._place_K, self._counts = torch.cat(places), [len(own) for own in places]
        self._value_MRD = torch.zeros(room.query.shape, dtype=model.dtype)
        """Each head's result from its row's prefix; zeros without a prefix."""
        self.score_MR1 = torch.zeros(*room.query.shape[:2], 1)
        self.weight_MR1 = torch.zeros_like(self.score_MR1)
        """The weight of the prefix in each head's result. Runs write it."""
        is_wide = model.dtype == torch.float32
        self.own_MRD = room.mixed_by_group if is_wide else torch.zeros(room.query.shape)
        """The rest of each head's result, already weighted, in float32. Runs write it."""
        self.column_M1 = torch.zeros(len(room.query), 1, dtype=torch.long)
        """The first column of a row's own attention. In float32 it is its prefix's last, for the score."""
        for prefix, own in zip(prefixes, places, strict=True):
            self.column_M1[own] = prefix.length - is_wide

    def attend(self, query_MRD: torch.Tensor, held: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Attend to keys and values [1, G, L, D] of each prefix."""
        _, per_group, size = query_MRD.shape
        queries = torch.split(query_MRD.index_select(0, self._place_K), self._counts)
        value_BGRD = self._value_MRD.view(-1, self._groups, per_group, size)
        score_BGR = self.score_MR1.view(value_BGRD.shape[:3])
        for rows, query, (keys, values) in zip(self._rows, queries, held, strict=True):
            value_1GTD, score_1GT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query.view(1, self._groups, -1, size), keys, values, scale=self._scale
            )
            shape = self._groups, len(rows), per_group
            value_BGRD.index_copy_(0, rows, value_1GTD.view(*shape, size).transpose(0, 1))
            score_BGR.index_copy_(0, rows, score_1GT.view(shape).transpose(0, 1))

    def add(self, mixed_MRD: torch.Tensor) -> None:
        """Write the sum of both parts."""
        torch.addcmul(self.own_MRD, self.weight_MR1, self._value_MRD, out=mixed_MRD)


class _Own:
    """Attention of neighbours to the columns that each row has for itself."""

    def __init__(self, room: Scratch, mask_MS: torch.Tensor, run: Run, prefixes: _Prefixes | None) -> None:
        rows = len(room.x)
        groups = len(room.query) // rows
        heads = slice(run.rows.start * groups, run.rows.stop * groups)
        self._query = room.query[heads]
        self._mixed = (room.mixed_by_group if prefixes is None else prefixes.own_MRD)[heads]
        self._mask_BG1S = mask_MS.view(rows, groups, 1, -1)[run.rows, ..., run.start : run.end]
        self._column_MR1: torch.Tensor | None = None
        if prefixes is not None and run.start:
            self._score_MR1, self._weight_MR1 = prefixes.score_MR1[heads], prefixes.weight_MR1[heads]
            self._column_MR1 = (prefixes.column_M1[heads, None] - run.start).expand(self._score_MR1.shape)

    def attend(self, keys: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        """Write the rows' own results, and the weights of their prefixes."""
        if self._column_MR1 is None:
            attend(self._query, self._mixed, keys, values, self._mask_BG1S, scale)
            return
        if keys.dtype != torch.float32:
            own_BGRD, score_BGR = flash_attention(self._query, keys, values, self._mask_BG1S, scale)
            weight_BGR = self._weight_MR1.view(score_BGR.shape)
            torch.sigmoid(self._score_MR1.view(score_BGR.shape) - score_BGR, out=weight_BGR)
            torch.mul(own_BGRD, (1 - weight_BGR)[..., None], out=self._mixed.view(own_BGRD.shape))
            return
        score_MRS = torch.baddbmm(self._mask_BG1S.flatten(0, 1), self._query, keys, alpha=scale)
        weight_MRS = score_MRS.scatter_(2, self._column_MR1, self._score_MR1).softmax(dim=-1)
        torch.gather(weight_MRS, 2, self._column_MR1, out=self._weight_MR1)
        weight_MRS.scatter_(2, self._column_MR1, 0.0)
        torch.bmm(weight_MRS, values, out=self._mixed)


class SingleTokens:
    """Makes its tensors once, and updates in place those that change with each token.

    The rows are in the first slots, where keys and values are read without a copy.
    """

    def __init__(self, model: FusedLlama, kv: KvSlots, rows: Sequence[LiveRow]) -> None:
        """Serves these rows, in slot order, until one of them outgrows the columns that are read of it."""
        model.reach(kv.columns)
        self._model, self._room = model, model.workspace(len(rows))
        self._rows = list(rows)
        self._positions: list[int] = []
        """Positions of the tokens read last."""
        self._memory = kv.slots, kv.columns
        ids, cached = [row.ids for row in rows], [row.cached for row in rows]
        plan = plan_reading(ids, cached, range(len(rows)), 2 * model.key_size)
        self._ends = [(run.rows, run.end) for run in plan.runs]
        self._numbers = torch.empty(2, len(rows) * model.groups, dtype=torch.long)
        position_M, self._place_M = self._numbers
        self._position_B, self._position_M1 = position_M[:: model.groups], position_M[:, None]
        self._attend = SplitAttention(model, self._room, plan)
        self._layers = []
        for kind, layer, held in zip(model.kinds, model.layers, kv.layers, strict=True):
            by_token = held.by_token(model.groups, model.size, model.dtype)
            self._layers.append((kind, layer, by_token, self._attend.held(held)))

    def serves(self, rows: Sequence[LiveRow], positions: Sequence[int], kv: KvSlots) -> bool:
        """Return whether the tensors fit a step of these rows, whose last tokens are at `positions`."""
        return (
            self._rows == rows
            and self._memory == (kv.slots, kv.columns)
            and all(max(positions[own]) < end for own, end in self._ends)
        )

    def __call__(self, positions: Sequence[int]) -> torch.Tensor:
        """Return the logits [B, V] after each row's last token, the only one that is not cached."""
        model, room = self._model, self._room
        before = [position - 1 for position in positions]
        if before != self._positions:
            self._place(before)
        self._positions = list(positions)
        self._numbers.add_(1)
        self._attend.look_at(self._position_M1)
        turns = model.turns(self._position_B)
        model.embed(tensor([row.ids[-1] for row in self._rows]), room)
        for kind, layer, by_token, held in self._layers:
            model.project(layer, room, turns[kind])
            by_token.index_copy_(0, self._place_M, room.new)
            self._attend(held)
            model.finish(layer, room)
        return model.logits(room.x)

    def _place(self, positions: Sequence[int]) -> None:
        """Set the state as if tokens at `positions` had just been read."""
        groups, columns = self._model.groups, self._memory[1]
        position_M = numpy.array(positions, numpy.int64).repeat(groups)
        place_M = position_M + columns * numpy.arange(len(position_M))
        self._numbers.copy_(torch.from_numpy(numpy.stack([position_M, place_M])))
        self._attend.look(self._position_M1)
