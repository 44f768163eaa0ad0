"""Key-value slots, a KV cache whose rows are conversations of different lengths; and the inputs of a pass.

Every layer holds tensors [slots, heads, columns, head_dim]. A step writes the new keys and values of
its rows at their own columns and attends over what the mask allows, so conversations join and leave
at any step. The last column is a waste bin for the padding of ragged steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, TypeAlias
from weakref import proxy

import numpy
import torch
from numpy.typing import ArrayLike
from transformers.cache_utils import Cache, CacheLayerMixin

from etude.inference.sampler import Row
from etude.inference.slot_table import Copy
from etude.models.architecture import SLIDING, layer_kinds, text_config
from etude.models.device import sent
from etude.models.policy import Policy

COLUMN_STEP = 64
"""Columns grow by this many, and attention always spans a multiple of it: sums over masked columns
then fall into the same lanes whatever the longest neighbour is, and come out the same bit for bit."""

_SPAN_STEP = 16
"""The same for attention that need not come out the same whatever the company."""

Slots: TypeAlias = slice | torch.Tensor
"""Some of the slots: side by side, and then read in place, or anywhere."""
_CPU = torch.device("cpu")


@dataclass(slots=True)
class StepPlan:
    """One forward pass: its tokens, and where their keys and values are read and written."""

    ids_BT: torch.Tensor
    position_BT: torch.Tensor
    rows: torch.Tensor
    """[B] slot of each row."""
    columns: torch.Tensor
    """[B, T] column that each new token is written to."""
    span: int
    """Columns that attention looks at."""
    masks: dict[str, torch.Tensor]
    """Additive, [B, 1, T, span], by kind of layer."""
    slots: Slots
    """The same as `rows`, to be read without a copy where these are 0…B-1."""


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values."""

    is_sliding = False

    def __init__(self, owner: KvSlots) -> None:
        super().__init__()
        # Weakly, or their memory would stay until Python looks for cycles.
        self._owner = proxy(owner)
        self._both: torch.Tensor | None = None
        """Keys and values together, where they have the same shape: [2, slots, heads, columns, head_dim]."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the owner's size; shapes [B, H, T, D]."""
        slots, columns = self._owner.slots, self._owner.columns
        shapes = [(slots, x.shape[1], columns, x.shape[3]) for x in (key_states, value_states)]
        if shapes[0] == shapes[1]:
            self._both = _zeros((2, *shapes[0]), key_states)
            self.keys, self.values = self._both.unbind()
        else:
            self.keys, self.values = (_zeros(shape, key_states) for shape in shapes)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [B, H, T, D]; return those of the step's span [B, H, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self._owner.plan
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held[plan.rows[:, None], :, plan.columns] = new.transpose(1, 2)
        return self.of(plan.slots, plan.span)

    def by_token(self, heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """All tokens' keys and values, [slots * H * columns, 2, D], in the order of `KvSlots.places`."""
        if self._both is None:
            shape = torch.empty(1, heads, 1, size, dtype=dtype)
            self.lazy_initialization(shape, shape)
        assert self._both is not None
        return self._both.view(2, -1, size).transpose(0, 1)

    def of(self, slots: Slots, span: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the first columns of some slots, [B, H, S, D]."""
        return self.keys[slots, :, :span], self.values[slots, :, :span]

    def resize(self, lengths: Sequence[int]) -> None:
        """Grow to the owner's size, keeping so many leading tokens of each slot."""
        if not self.is_initialized:
            return
        before = self.keys, self.values
        self.lazy_initialization(*before)
        for old, new in zip(before, (self.keys, self.values), strict=True):
            for slot, length in enumerate(lengths[: len(old)]):
                new[slot, :, :length] = old[slot, :, :length]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Put leading tokens of some slots into others; all are read before any is written."""
        if not self.is_initialized:
            return
        for held in (self.keys, self.values) if self._both is None else self._both.transpose(0, 1)[None]:
            read, written = list[torch.Tensor](), set[int]()
            for copy in copies:
                tokens = held[copy.source, ..., : copy.length, :]
                # A second copy only where the first one of another would overwrite it.
                read.append(tokens.clone() if copy.source in written else tokens)
                written.add(copy.target)
            for copy, tokens in zip(copies, read, strict=True):
                held[copy.target, ..., : copy.length, :] = tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the span; masks are made by the caller, so this is for information."""
        return self._owner.plan.span, 0

    def get_seq_length(self) -> int:
        """Rows have lengths of their own; positions are always given by the caller."""
        return 0

    def get_max_length(self) -> int:
        """No maximum: columns grow."""
        return -1

    get_max_cache_shape = get_max_length  # Its name in earlier releases of transformers.


class KvSlots(Cache):  # type: ignore[misc]
    """The slots of all layers. Slots and columns grow on demand and never shrink."""

    plan: StepPlan
    """Of the pass that the model's own modules make."""

    def __init__(self, layers: int, slots: int) -> None:
        self.slots = slots
        self.columns = COLUMN_STEP + 1

        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def reserve(self, held: Sequence[int], length: int) -> None:
        """Make room for so many tokens per slot; `held` is how many each slot has already, one for each slot.

        Growing copies these: a long conversation must not make it happen every few tokens, and what is not
        written to takes no memory yet.
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
        """Put leading tokens of some slots into others; all are read before any is written."""
        copies = [copy for copy in copies if copy.length]
        for layer in self.layers if copies else ():
            layer.copy(copies)

    def places(self, heads: int, slots: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Where tokens in columns [N] or [B, T] of slots go in a layer as a list of tokens, [N * heads]."""
        first = torch.add(columns, slots, alpha=heads * self.columns)
        head_H = torch.arange(0, heads * self.columns, self.columns, device=slots.device)
        return (first[..., None] + head_H).flatten()


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros of the dtype and on the device of `like`; on a CPU those that nobody writes to take no memory."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    # numpy asks for huge pages, of which one byte takes all.
    memory = mmap(-1, math.prod(shape) * like.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def rounded_up(count: int, step: int = _SPAN_STEP) -> int:
    """The next multiple of the step: of `_SPAN_STEP`, the columns that attention spans for so many tokens."""
    return -(-count // step) * step


class InputMaker:
    """Makes inputs for one model."""

    def __init__(self, policy: Policy) -> None:
        self._device = policy.device
        self._kinds = set(layer_kinds(policy.model))
        window = getattr(text_config(policy.model), "sliding_window", None)
        self._window: int | None = window if SLIDING in self._kinds else None
        dtype = next(policy.model.parameters()).dtype
        self._hide = torch.tensor(torch.finfo(dtype).min, dtype=dtype, device=policy.device)

    def numbers(self, rows: Sequence[Row], shape: tuple[int, int], kv: KvSlots) -> torch.Tensor:
        """Ids, positions and columns of the next tokens, [3, B, T].

        They are padded on the left, and where `shape`, B and T, has more rows, with rows of padding.
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
        """The step of `kv` on these numbers; with `leading` the slots are 0…B-1, and are read in place."""
        ids_BT, position_BT, column_BT = numbers_3BT
        masks = self.masks(position_BT, span)
        slots = slice(len(slot_B)) if leading else slot_B
        kv.plan = StepPlan(ids_BT, position_BT, slot_B, column_BT, span, masks, slots)
        return kv.plan

    def looks_back(self, span: int) -> bool:
        """Whether every layer looks back over so many tokens."""
        return self._window is None or self._window >= span

    def masks(self, position_BT: torch.Tensor, span: int) -> dict[str, torch.Tensor]:
        """By kind of layer, for tokens at these positions."""
        column_S, last_B1T1 = torch.arange(span, device=self._device), position_BT[:, None, :, None]
        hidden_B1TS = column_S > last_B1T1
        masks = dict.fromkeys(self._kinds, hidden_B1TS * self._hide)
        if self._window is not None and self._window < span:
            masks[SLIDING] = (hidden_B1TS | (column_S <= last_B1T1 - self._window)) * self._hide
        return masks


def tensor(numbers: ArrayLike, device: torch.device = _CPU) -> torch.Tensor:
    """Integers as `torch.tensor` gives them, which takes five times as long for lists."""
    return sent(torch.from_numpy(numpy.asarray(numbers, numpy.int64)), device)


_ALONE = 2**17
"""Numbers among a row's keys in a layer from which on it attends alone: to read the padding of others, or to
copy, would take longer than calls of its own."""
_ALONE_SCORES = 2**14
"""The same for the scores of a head."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a pass that attend together. They have up to twice as many tokens as each other."""

    tokens: slice
    """Those of the pass, row after row."""
    shape: tuple[int, int]
    """Rows B, and tokens T of the longest."""
    padded: tuple[torch.Tensor, torch.Tensor] | None
    """Unless all rows are as long: the token in each place of [B * T], and the place of each token."""
    slots: Slots
    span: int
    masks: dict[str, torch.Tensor]
    """Additive, [B, 1, T, span], by kind of layer."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Inputs of a forward pass of N tokens."""

    ids_N: torch.Tensor
    position_N: torch.Tensor
    slot_N: torch.Tensor
    column_N: torch.Tensor
    """Where keys and values are written to."""
    groups: list[Group]


def padded(plan: StepPlan) -> Ragged:
    """All rows in one group, padding included."""
    rows, width = plan.ids_BT.shape
    group = Group(slice(0, rows * width), (rows, width), None, plan.slots, plan.span, plan.masks)
    slot_BT = plan.rows[:, None].expand(-1, width)
    ids_N, position_N = plan.ids_BT.flatten(), plan.position_BT.flatten()
    return Ragged(ids_N, position_N, slot_BT.flatten(), plan.columns.flatten(), [group])


def ragged(
    rows: Sequence[Row], counts: Sequence[int], inputs: InputMaker, size: int, apart: int = 0
) -> tuple[Ragged, list[int]]:
    """For the next `counts` tokens of the rows; a token has keys of `size` numbers in a layer.

    And of each row the place of the first of its tokens. So many of the first rows, of one token each, attend
    `apart` and are in no group; theirs are the first tokens.
    """
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    if apart:
        together[0, -1] = [*range(apart)]
    for index, (row, count) in enumerate(zip(rows[apart:], counts[apart:], strict=True), apart):
        length = row.cached + count
        is_alone = length * size >= _ALONE or length * count >= _ALONE_SCORES
        together[count.bit_length(), index if is_alone else -1].append(index)
    ids, starts, groups = list[int](), [0] * len(rows), list[Group]()
    positions, slots = list[numpy.ndarray](), list[numpy.ndarray]()
    for members in together.values():
        members.sort(key=lambda index: rows[index].slot)
        first = len(ids)
        for index in members:
            row, count = rows[index], counts[index]
            starts[index] = len(ids)
            ids += row.ids[row.cached : row.cached + count]
            positions.append(numpy.arange(row.cached, row.cached + count))
            slots.append(numpy.full(count, row.slot))
        own = [(rows[index], counts[index]) for index in members]
        if first >= apart:
            groups.append(_group(own, first, inputs))
    numbers_2N = numpy.stack([numpy.concatenate(positions), numpy.concatenate(slots)])
    position_N, slot_N = tensor(numbers_2N)
    return Ragged(tensor(ids), position_N, slot_N, position_N, groups), starts


def _group(own: Sequence[tuple[Row, int]], first: int, inputs: InputMaker) -> Group:
    """Of rows in the order of their slots, and their counts; the first token of the first is given."""
    before = numpy.array([row.cached for row, _ in own])[:, None]
    count_B1 = numpy.array([count for _, count in own])[:, None]
    width, span = int(count_B1.max()), rounded_up(int((before + count_B1).max()))
    place_BT = numpy.minimum(numpy.arange(width), count_B1 - 1)
    padded = None
    if count_B1.min() < width:
        start_B1 = count_B1.cumsum(axis=0) - count_B1
        is_token = numpy.arange(width) < count_B1
        padded = tensor((start_B1 + place_BT).ravel()), tensor(is_token.ravel().nonzero()[0])
    held = [row.slot for row, _ in own]
    in_a_row = held[-1] - held[0] == len(held) - 1
    return Group(
        tokens=slice(first, first + int(count_B1.sum())),
        shape=(len(own), width),
        padded=padded,
        slots=slice(held[0], held[-1] + 1) if in_a_row else tensor(held),
        span=span,
        masks=inputs.masks(tensor(before + place_BT), span),
    )
