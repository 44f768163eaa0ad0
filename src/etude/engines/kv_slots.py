"""Key-value slots: a KV cache whose rows are conversations of different lengths.

Every layer holds tensors [slots, heads, columns, head_dim]. A step writes its rows' new keys and values at
their own columns, and attends over the columns that the mask allows. So conversations join and leave at any
step. The last column is a waste bin for the padding of ragged steps. The slot table knows which row has which
slot, what earlier rows left in the others, and who can share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, TypeAlias
from weakref import proxy

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from etude.core.sample import shared_length
from etude.engines.sampler import LiveRow

COLUMN_STEP = 64
"""Columns grow by this many, and attention always spans a multiple of it. Sums over masked columns then fall
into the same lanes, and are equal bit for bit, however long the longest neighbour is."""

_LAZY_SLOTS, _LAZY_COLUMNS = 128, 256
"""How many there are from the start where unwritten ones take no memory: growing copies the others."""

_SPAN_STEP = 16
"""The step of spans for attention that may differ in the last bits between batches."""

Slots: TypeAlias = slice | torch.Tensor
"""Some of the slots: adjacent ones, which are read in place, or any."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Leading tokens of one slot to copy into another."""

    source: int
    target: int
    length: int
    count: int = 1
    """Number of adjacent slots that they are copied into, from `target` on."""


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
            self.hold(_zeros((2, *shapes[0]), key_states))
        else:
            self.keys, self.values = (_zeros(shape, key_states) for shape in shapes)
        self.is_initialized = True

    def hold(self, both: torch.Tensor) -> None:
        """Hold keys and values in a tensor [2, slots, heads, columns, head_dim]."""
        self._both, self.is_initialized = both, True
        self.keys, self.values = both.unbind()
        self._by_token = both.view(2, -1, both.shape[-1]).transpose(0, 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [B, H, T, D]; return all in the step's span, [B, H, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self._owner.plan
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held[plan.rows[:, None], :, plan.columns] = new.transpose(1, 2)
        return self.columns(plan.slots, plan.span)

    def by_token(self, heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return all keys and values [slots * H * columns, 2, D], in the order of `KvSlots.places`."""
        if not self.is_initialized:
            shape = torch.empty(1, heads, 1, size, dtype=dtype)
            self.lazy_initialization(shape, shape)
        return self._by_token

    def columns(self, slots: Slots, end: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, H, S, D] in the columns of some slots from `start` up to `end`."""
        return self.keys[slots, :, start:end], self.values[slots, :, start:end]

    def resize(self, lengths: Sequence[int]) -> None:
        """Grow to the owner's size; keep the first `lengths` tokens of the slots."""
        if not self.is_initialized:
            return
        before = self.keys, self.values
        self.lazy_initialization(*before)
        for old, new in zip(before, (self.keys, self.values), strict=True):
            spans = [*map(rounded_up, lengths[: len(old)])]
            for span, run in groupby(range(len(spans)), key=spans.__getitem__):
                slots = [*run]
                alike = slice(slots[0], slots[-1] + 1)
                new[alike, :, :span] = old[alike, :, :span]

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
                written.update(range(copy.target, copy.target + copy.count))
            for copy, tokens in zip(copies, read, strict=True):
                held[copy.target : copy.target + copy.count, ..., : copy.length, :] = tokens

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

    def __init__(self, layers: int, slots: int, *, is_lazy: bool = False) -> None:
        """With `is_lazy`, as on a CPU, unwritten slots and columns take no memory."""
        self.slots = max(slots, _LAZY_SLOTS) if is_lazy else slots
        self.columns = (_LAZY_COLUMNS if is_lazy else COLUMN_STEP) + 1
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
        joined = list[Copy]()
        for copy in copies:
            last = joined[-1] if joined else copy
            if copy == replace(last, target=last.target + last.count, count=1):
                joined[-1] = replace(last, count=last.count + 1)
            elif copy.length:
                joined.append(copy)
        for layer in self.layers if joined else ():
            layer.copy(joined)

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


_FIRST_SLOTS = 8
_BLOCK = 16
"""Tokens per block, by which prompts that begin alike are found. The shared length is counted exactly."""
_LEAST = 8
"""Minimum length of a prompt that is also found as a whole, like the prompt of a group. Reading fewer tokens
is faster than waiting until another row has read them."""


@dataclass(slots=True, eq=False)
class _Held:
    """The contents of a slot, and their owner."""

    slot: int
    conversation: str = ""
    ids: list[int] = field(default_factory=list)
    """The row's own ids while it is in the slot; later the tokens that it left."""
    row: LiveRow | None = None
    blocks: list[int] = field(default_factory=list)
    """Keys in the table's `_blocks` that lead to this slot."""

    @property
    def length(self) -> int:
        """Number of tokens whose keys and values are in the slot."""
        return len(self.ids) if self.row is None else self.row.cached


class SlotTable:
    """Slots by number, made as they are needed."""

    def __init__(self, kept: int, least: int) -> None:
        """Up to `kept` slots keep the tokens of finished rows; `least` slots exist from the start."""
        self._kept = kept
        self._held: list[_Held] = []
        self._unused: list[_Held] = []
        self._idle: dict[_Held, None] = {}
        """Used and released slots, the one released longest ago first."""
        self._blocks: dict[int, dict[_Held, None]] = {}
        """For a hash of all tokens up to a block's end, the slots that begin with them, in order."""
        self._waiting: dict[LiveRow, tuple[LiveRow, int]] = {}
        """Rows that will copy this many tokens from another row, once it has read them."""
        self._copies: list[tuple[LiveRow, Copy]] = []
        self._grow(max(least, min(kept, _FIRST_SLOTS)))

    def __len__(self) -> int:
        return len(self._held)

    def lengths(self) -> list[int]:
        """Return the number of tokens in each slot, including those still to be copied from it."""
        lengths = [held.length for held in self._held]
        for _, copy in self._copies:  # The slot may already have a new row, which has read nothing yet.
            lengths[copy.source] = max(lengths[copy.source], copy.length)
        return lengths

    def place(self, row: LiveRow, *, reuse: bool) -> None:
        """Give the row a slot: its own conversation's, else an unused one, else the one released longest ago.

        With `reuse`, the tokens that it shares with its conversation's slot count as read. If it shares more
        with another slot, `copies` will copy them from there.
        """
        held, shared = None, 0
        for idle in self._idle if reuse else ():
            if idle.conversation == row.conversation:
                # The last token is always read again, because its logits are needed.
                alike = min(shared_length(idle.ids, row.ids), len(row.ids) - 1)
                held, shared = (idle, alike) if alike > shared else (held, shared)
        blocks = [*_blocks(row.ids)] if reuse else []
        known = [block for block in blocks if block in self._blocks]
        source = next(iter(self._blocks[known[-1]])) if known else None
        more = 0 if source is None else min(shared_length(source.ids, row.ids), len(row.ids) - 1)
        if source is not None and source is not held and more > shared:
            held, leader, slot = held or self._find_free_slot(), source.row, source.slot
            if leader is None:
                self._copies.append((row, Copy(slot, held.slot, more)))
            else:
                self._waiting[row] = (leader, more)
        held = held or self._find_free_slot()
        self._idle.pop(held, None)
        for block in held.blocks:
            holders = self._blocks[block]
            del holders[held]
            if not holders:
                del self._blocks[block]
        held.row, held.conversation, held.ids = row, row.conversation, row.ids
        row.slot, row.cached = held.slot, shared
        held.blocks = blocks
        for block in held.blocks:
            self._blocks.setdefault(block, {})[held] = None

    def waits(self, row: LiveRow) -> bool:
        """Return whether the row must wait, because another row is about to read the same tokens."""
        return row in self._waiting

    def leads(self, row: LiveRow) -> bool:
        """Return whether others wait until the row has read all tokens but the last, which they all have."""
        return (row, len(row.ids) - 1) in self._waiting.values()

    def copies(self) -> list[Copy]:
        """Return the copies to make now, before any slot is written to; their tokens count as read."""
        ready, self._copies = self._copies, []
        for row, (leader, length) in list(self._waiting.items()):
            is_here = self._held[leader.slot].row is leader
            if is_here and leader.cached >= length:
                ready.append((row, Copy(leader.slot, row.slot, length)))
            if not is_here or leader.cached >= length:
                del self._waiting[row]  # Without its leader, the row reads the tokens itself.
        for row, copy in ready:
            row.cached = copy.length
        return [copy for _, copy in ready]

    def release(self, slot: int) -> None:
        """Keep the tokens that the slot's row has read for its conversation's next turn."""
        held = self._held[slot]
        if (row := held.row) is not None:
            self._waiting.pop(row, None)
            held.row, held.ids = None, row.ids[: row.cached]
            self._idle[held] = None

    def forget(self) -> None:
        """Invalidate the contents of all slots; rows in them are read again from the start."""
        self._blocks.clear()
        for held in self._held:
            held.blocks = []
            if held.row is None:
                held.ids = []
            else:
                held.row.cached = 0

    def swap(self, first: int, second: int) -> tuple[Copy, Copy]:
        """Exchange two slots; return the two copies to make at the same time."""
        held = self._held
        pair = held[first], held[second]
        lengths = [slot.length for slot in pair]
        held[second], held[first] = pair
        for slot in (first, second):
            held[slot].slot, row = slot, held[slot].row
            if row is not None:
                row.slot = slot
        return Copy(first, second, lengths[0]), Copy(second, first, lengths[1])

    def _find_free_slot(self) -> _Held:
        """Return a slot of any conversation: an unused or new one, else the one released longest ago."""
        if not self._unused and (len(self) < self._kept or not self._idle):
            self._grow(max(len(self), _FIRST_SLOTS) if len(self) < self._kept else len(self) // 2)
        return self._unused.pop() if self._unused else next(iter(self._idle))

    def _grow(self, count: int) -> None:
        made = [_Held(slot) for slot in range(len(self), len(self) + count)]
        self._held += made
        self._unused = [*reversed(made), *self._unused]


def _blocks(ids: list[int]) -> Iterator[int]:
    """Yield a hash of all tokens up to the end of each whole block, and one of all tokens."""
    block = end = 0
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        block = hash((block, *ids[end - _BLOCK : end]))
        yield block
    if end < len(ids) >= _LEAST:
        yield hash((block, *ids[end:]))
