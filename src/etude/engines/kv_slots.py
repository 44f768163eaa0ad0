"""Key-value slots: a KV cache whose rows are conversations of different lengths.

Every layer holds tensors [slots, heads, columns, head_dim]. A step writes its rows' new keys and values at
their own columns, and attends over the columns that the mask allows. So conversations join and leave at any
step. The last column is a waste bin for the padding of ragged steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, TypeAlias
from weakref import proxy

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from etude.engines.slot_table import Copy

COLUMN_STEP = 64
"""Columns grow by this many, and attention always spans a multiple of it. Sums over masked columns then fall
into the same lanes, and are equal bit for bit, however long the longest neighbour is."""

_SPAN_STEP = 16
"""The step of spans for attention that may differ in the last bits between batches."""

Slots: TypeAlias = slice | torch.Tensor
"""Some of the slots: adjacent ones, which are read in place, or any."""


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
