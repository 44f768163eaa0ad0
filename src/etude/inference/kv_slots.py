"""Key-value slots, a KV cache whose rows are conversations of different lengths; and the inputs of a pass.

Every layer holds tensors [slots, heads, columns, head_dim]. A step writes its rows' new keys and values at
their own columns, and attends over the columns that the mask allows. So conversations join and leave at any
step. The last column is a waste bin for the padding of ragged steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, TypeAlias
from weakref import proxy

import numpy
import torch
from numpy.typing import ArrayLike
from transformers.cache_utils import Cache, CacheLayerMixin

from etude.inference.sampler import LiveRow
from etude.inference.shared_prefixes import Prefix
from etude.inference.slot_table import Copy
from etude.models.architecture import SLIDING, layer_kinds, text_config
from etude.models.device import copy_to_device
from etude.models.policy import Policy

COLUMN_STEP = 64
"""Columns grow by this many, and attention always spans a multiple of it. Sums over masked columns then fall
into the same lanes, and are equal bit for bit, however long the longest neighbour is."""

_SPAN_STEP = 16
"""The step of spans for attention that may differ in the last bits between batches."""

Slots: TypeAlias = slice | torch.Tensor
"""Some of the slots: adjacent ones, which are read in place, or any."""
_CPU = torch.device("cpu")


@dataclass(slots=True)
class StepPlan:
    """One forward pass: its tokens, and where it reads and writes their keys and values."""

    ids_BT: torch.Tensor
    position_BT: torch.Tensor
    rows: torch.Tensor
    """Slot of each row, [B]."""
    columns: torch.Tensor
    """Column that each new token is written to, [B, T]."""
    span: int
    """Number of columns that attention looks at."""
    masks: dict[str, torch.Tensor]
    """Additive masks [B, 1, T, span], by kind of layer."""
    slots: Slots
    """The same slots as `rows`; a slice if they are 0…B-1, to read them without a copy."""


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values."""

    is_sliding = False

    def __init__(self, owner: KvSlots) -> None:
        super().__init__()
        # A strong reference would keep the memory until Python looks for cycles.
        self._owner = proxy(owner)
        self._both: torch.Tensor | None = None
        """Keys and values in one tensor, if their shapes are equal: [2, slots, heads, columns, head_dim]."""
        self._by_token = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate tensors of the owner's size, for states of shape [B, H, T, D]."""
        slots, columns = self._owner.slots, self._owner.columns
        shapes = [(slots, x.shape[1], columns, x.shape[3]) for x in (key_states, value_states)]
        if shapes[0] == shapes[1]:
            self._both = _zeros((2, *shapes[0]), key_states)
            self.keys, self.values = self._both.unbind()
            self._by_token = self._both.view(2, -1, shapes[0][3]).transpose(0, 1)
        else:
            self.keys, self.values = (_zeros(shape, key_states) for shape in shapes)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [B, H, T, D]; return all in the step's span, [B, H, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self._owner.plan
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held[plan.rows[:, None], :, plan.columns] = new.transpose(1, 2)
        return self.of(plan.slots, plan.span)

    def by_token(self, heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return all keys and values [slots * H * columns, 2, D], in the order of `KvSlots.places`."""
        if not self.is_initialized:
            shape = torch.empty(1, heads, 1, size, dtype=dtype)
            self.lazy_initialization(shape, shape)
        return self._by_token

    def of(self, slots: Slots, end: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, H, S, D] in the columns of some slots from `start` up to `end`."""
        return self.keys[slots, :, start:end], self.values[slots, :, start:end]

    def resize(self, lengths: Sequence[int]) -> None:
        """Grow to the owner's size; keep the first `lengths` tokens of the slots."""
        if not self.is_initialized:
            return
        before = self.keys, self.values
        self.lazy_initialization(*before)
        for old, new in zip(before, (self.keys, self.values), strict=True):
            for slot, length in enumerate(lengths[: len(old)]):
                new[slot, :, :length] = old[slot, :, :length]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy leading tokens of some slots into others; all are read before any is written."""
        if not self.is_initialized:
            return
        for held in (self.keys, self.values) if self._both is None else self._both.transpose(0, 1)[None]:
            read, written = list[torch.Tensor](), set[int]()
            for copy in copies:
                tokens = held[copy.source, ..., : copy.length, :]
                # Clone only tokens that an earlier copy would overwrite.
                read.append(tokens.clone() if copy.source in written else tokens)
                written.add(copy.target)
            for copy, tokens in zip(copies, read, strict=True):
                held[copy.target, ..., : copy.length, :] = tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the span. The caller makes the masks, so this is for information."""
        return self._owner.plan.span, 0

    def get_seq_length(self) -> int:
        """Return 0: rows have different lengths, and the caller always gives positions."""
        return 0

    def get_max_length(self) -> int:
        """Return -1, for no maximum: columns grow."""
        return -1

    get_max_cache_shape = get_max_length  # The name in earlier releases of transformers.


class KvSlots(Cache):  # type: ignore[misc]
    """The slots of all layers. Slots and columns grow on demand and never shrink."""

    plan: StepPlan
    """The pass that the model's own modules make."""

    def __init__(self, layers: int, slots: int) -> None:
        self.slots = slots
        self.columns = COLUMN_STEP + 1

        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def reserve(self, held: Sequence[int], length: int) -> None:
        """Make room for `length` tokens per slot; `held` is the number of tokens that each slot already has.

        Growing copies these. Columns at least double, so that a long conversation does not grow them every
        few tokens. Unwritten columns take no memory yet on a CPU.
        """
        columns = rounded_up(max(length, 1), COLUMN_STEP) + 1
        if len(held) <= self.slots and columns <= self.columns:
            return
        if columns > self.columns:
            columns = max(columns, 2 * (self.columns - 1) + 1)
        self.slots, self.columns = max(len(held), self.slots), max(columns, self.columns)
        for layer in self.layers:
            layer.resize(held)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy leading tokens of some slots into others; all are read before any is written."""
        copies = [copy for copy in copies if copy.length]
        for layer in self.layers if copies else ():
            layer.copy(copies)

    def places(self, heads: int, slots: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return the indices [N * heads] in `by_token` of tokens in `columns` [N] or [B, T] of `slots`."""
        first = torch.add(columns, slots, alpha=heads * self.columns)
        head_H = torch.arange(0, heads * self.columns, self.columns, device=slots.device)
        return (first[..., None] + head_H).flatten()


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return zeros of the dtype and on the device of `like`; on a CPU, unwritten ones take no memory."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    # numpy asks for huge pages, which a single byte allocates in full.
    memory = mmap(-1, math.prod(shape) * like.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def rounded_up(count: int, step: int = _SPAN_STEP) -> int:
    """Round up to a multiple of `step`; by default, to the columns that attention spans for `count`."""
    return -(-count // step) * step


class InputMaker:
    """Makes the inputs of one model."""

    def __init__(self, policy: Policy) -> None:
        self._device = policy.device
        self._kinds = set(layer_kinds(policy.model))
        window = getattr(text_config(policy.model), "sliding_window", None)
        self._window: int | None = window if SLIDING in self._kinds else None
        dtype = next(policy.model.parameters()).dtype
        self._hide = torch.tensor(torch.finfo(dtype).min, dtype=dtype, device=policy.device)

    def numbers(self, rows: Sequence[LiveRow], shape: tuple[int, int], kv: KvSlots) -> torch.Tensor:
        """Return ids, positions and columns of the rows' next tokens, [3, B, T].

        Tokens are padded on the left. If `shape` (B, T) has more rows, padding rows are added.
        """
        numbers_3BT = numpy.zeros((3, *shape), numpy.int64)
        numbers_3BT[2] = kv.columns - 1  # The waste bin.
        for index, row in enumerate(rows):
            end = min(row.cached + shape[1], len(row.ids))
            new = numbers_3BT[:, index, shape[1] - end + row.cached :]
            new[0], new[1:] = row.ids[row.cached : end], numpy.arange(row.cached, end)
        return tensor(numbers_3BT, self._device)

    def planned(
        self, numbers_3BT: torch.Tensor, slot_B: torch.Tensor, span: int, kv: KvSlots, *, leading: bool
    ) -> StepPlan:
        """Plan a step of `kv` on these numbers. With `leading`, the slots are 0…B-1 and are read in place."""
        ids_BT, position_BT, column_BT = numbers_3BT
        masks = self.masks(position_BT, span)
        slots = slice(len(slot_B)) if leading else slot_B
        kv.plan = StepPlan(ids_BT, position_BT, slot_B, column_BT, span, masks, slots)
        return kv.plan

    def looks_back(self, span: int) -> bool:
        """Return whether every layer looks back over `span` tokens."""
        return self._window is None or self._window >= span

    def masks(self, position_BT: torch.Tensor, span: int) -> dict[str, torch.Tensor]:
        """Return additive masks by kind of layer, for tokens at these positions."""
        column_S, last_B1T1 = torch.arange(span, device=self._device), position_BT[:, None, :, None]
        hidden_B1TS = column_S > last_B1T1
        masks = dict.fromkeys(self._kinds, hidden_B1TS * self._hide)
        if self._window is not None and self._window < span:
            masks[SLIDING] = (hidden_B1TS | (column_S <= last_B1T1 - self._window)) * self._hide
        return masks


def tensor(numbers: ArrayLike, device: torch.device = _CPU) -> torch.Tensor:
    """Return integers like `torch.tensor`, which takes five times as long for lists."""
    return copy_to_device(torch.from_numpy(numpy.asarray(numbers, numpy.int64)), device)


_PADDING = 2**17
"""Numbers in a layer's keys that can be read in the time that a separate group's calls take."""
_ALONE_SCORES = 2**14
"""A row of several tokens with this many scores in a head attends alone, and so does one with `_PADDING`."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a pass that attend together. Their token counts differ by less than a factor of two."""

    count: int
    """The group's tokens, row after row; they follow the tokens of the group before."""
    shape: tuple[int, int]
    """The number of rows B, and T, the tokens of the longest."""
    padded: tuple[torch.Tensor, torch.Tensor] | None
    """The token in each place of [B * T], and the place of each token; None if all rows are equally long."""
    slots: Slots
    prefix: tuple[int, int]
    """The slot in which all rows read their first columns, and how many; 0 if each reads all of its own."""
    span: int
    masks: dict[str, torch.Tensor]
    """Additive masks [B, 1, T, S] of the columns from the prefix to the span, by kind of layer."""


@dataclass(frozen=True, slots=True)
class RaggedInputs:
    """Inputs of a forward pass of N tokens."""

    ids_N: torch.Tensor
    position_N: torch.Tensor
    slot_N: torch.Tensor
    column_N: torch.Tensor
    """Columns that keys and values are written to."""
    groups: list[RowGroup]


def pad_left(plan: StepPlan) -> RaggedInputs:
    """Return all rows as one group, padding included."""
    rows, width = plan.ids_BT.shape
    group = RowGroup(rows * width, (rows, width), None, plan.slots, (0, 0), plan.span, plan.masks)
    slot_BT = plan.rows[:, None].expand(-1, width)
    ids_N, position_N = plan.ids_BT.flatten(), plan.position_BT.flatten()
    return RaggedInputs(ids_N, position_N, slot_BT.flatten(), plan.columns.flatten(), [group])


def make_ragged_inputs(
    rows: Sequence[LiveRow],
    counts: Sequence[int],
    inputs: InputMaker,
    size: int,
    prefixes: Sequence[Prefix] = (),
) -> tuple[RaggedInputs, list[int]]:
    """Return the inputs for the next `counts` tokens of the rows, and the place of each row's last token.

    A token's keys in a layer have `size` numbers. Rows of single tokens are in slot order. `prefixes` name
    some of these by their indices.
    """
    parts: list[tuple[Sequence[int], int]] = [(prefix.rows, prefix.length) for prefix in prefixes]
    parts += [(part, 0) for part in _groups(rows, counts, size, {row for part, _ in parts for row in part})]
    ids, positions, slots = list[int](), list[int](), list[int]()
    last, groups = [0] * len(rows), list[RowGroup]()
    for members, shared in parts:
        for index in members:
            row, count = rows[index], counts[index]
            ids += row.ids[row.cached : row.cached + count]
            last[index] = len(ids) - 1
            positions += range(row.cached, row.cached + count)
            slots += [row.slot] * count
        groups.append(_group([(rows[index], counts[index]) for index in members], shared, inputs))
    ids_N, position_N, slot_N = tensor([ids, positions, slots])
    return RaggedInputs(ids_N, position_N, slot_N, position_N, groups), last


def _groups(
    rows: Sequence[LiveRow], counts: Sequence[int], size: int, prefixed: Set[int]
) -> Iterator[Sequence[int]]:
    """Yield the indices of the rows without a prefix, by group.

    Single tokens attend together with neighbours, whose slots need no copy, while their padding takes less
    time than separate calls. Rows of several tokens attend with rows of like length, in slot order.
    """
    run, longest, total = list[int](), 0, 0
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        length = row.cached + count
        if index in prefixed:
            continue
        if count > 1:
            is_alone = length * size >= _PADDING or length * count >= _ALONE_SCORES
            together[count.bit_length(), index if is_alone else -1].append(index)
            continue
        longest, total = max(longest, length), total + length
        is_next = run and row.slot == rows[run[-1]].slot + 1
        if run and not (is_next and ((len(run) + 1) * longest - total) * size <= _PADDING):
            yield run
            run, longest, total = [], length, length
        run.append(index)
    if run:
        yield run
    for members in together.values():
        yield sorted(members, key=lambda index: rows[index].slot)


def _group(own: Sequence[tuple[LiveRow, int]], shared: int, inputs: InputMaker) -> RowGroup:
    """Return a group of rows in slot order, with their token counts. All share the first `shared` tokens."""
    counts = [count for _, count in own]
    width, span = max(counts), rounded_up(max(row.cached + count for row, count in own))
    position_BT = numpy.array([row.cached for row, _ in own])[:, None]
    padded = None
    if width > 1:
        count_B1 = numpy.array(counts)[:, None]
        place_BT = numpy.minimum(numpy.arange(width), count_B1 - 1)
        position_BT = position_BT + place_BT
        if min(counts) < width:
            start_B1 = count_B1.cumsum(axis=0) - count_B1
            is_token = numpy.arange(width) < count_B1
            padded = tensor((start_B1 + place_BT).ravel()), tensor(is_token.ravel().nonzero()[0])
    held = [row.slot for row, _ in own]
    in_a_row = held[-1] - held[0] == len(held) - 1
    masks = inputs.masks(tensor(position_BT), span)
    return RowGroup(
        count=sum(counts),
        shape=(len(own), width),
        padded=padded,
        slots=slice(held[0], held[-1] + 1) if in_a_row else tensor(held),
        prefix=(held[0], shared),
        span=span,
        masks={kind: mask_B1TS[..., shared:] for kind, mask_B1TS in masks.items()},
    )
