"""The inputs of a pass: its tokens, the rows that attend together, and the prefixes that they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy
import torch
from numpy.typing import ArrayLike

from etude.core.sample import shared_length
from etude.engines.kv_slots import KvSlots, Slots, StepPlan, rounded_up
from etude.engines.sampler import LiveRow
from etude.models.architecture import SLIDING, layer_kinds, text_config
from etude.models.device import copy_to_device
from etude.models.policy import Policy

_CPU = torch.device("cpu")


class InputMaker:
    """Makes the inputs of one model."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        """`dtype` is the type of attention scores, and of the masks that are added to them."""
        config = text_config(policy.model)
        self._device = policy.device
        self._kinds = set(layer_kinds(policy.model))
        self._window: int | None = getattr(config, "sliding_window", None) if SLIDING in self._kinds else None
        self._key_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
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

    def plan(
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

    def pad_left(self, plan: StepPlan) -> RaggedInputs:
        """Return all rows of a step as one group, padding included."""
        rows, width = plan.ids_BT.shape
        masks = self._group_masks(plan.masks, width, 0)
        group = RowGroup(rows * width, (rows, width), None, plan.slots, (0, 0), plan.span, masks)
        slot_BT = plan.rows[:, None].expand(-1, width)
        ids_N, position_N = plan.ids_BT.flatten(), plan.position_BT.flatten()
        return RaggedInputs(ids_N, position_N, slot_BT.flatten(), plan.columns.flatten(), [group])

    def group(self, own: Sequence[tuple[LiveRow, int]], shared: int) -> RowGroup:
        """Return a group of rows in slot order, with their token counts. All have `shared` first tokens."""
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
        return RowGroup(
            count=sum(counts),
            shape=(len(own), width),
            padded=padded,
            slots=slice(held[0], held[-1] + 1) if in_a_row else tensor(held),
            prefix=(held[0], shared),
            span=span,
            masks=self._group_masks(self.masks(tensor(position_BT), span), width, shared),
        )

    def _group_masks(
        self, masks: dict[str, torch.Tensor], width: int, shared: int
    ) -> dict[str, torch.Tensor]:
        """Return `RowGroup.masks` for rows of up to `width` tokens that have `shared` first tokens."""
        masks = {kind: mask_B1TS[..., shared:] for kind, mask_B1TS in masks.items()}
        if width > 1:
            return masks
        return {kind: mask.expand(-1, self._key_heads, -1, -1).flatten(0, 1) for kind, mask in masks.items()}


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
    """Additive masks from the prefix to the span, by kind of layer: [B, 1, T, S]; single: [B * G, 1, S]."""


@dataclass(frozen=True, slots=True)
class RaggedInputs:
    """Inputs of a forward pass of N tokens."""

    ids_N: torch.Tensor
    position_N: torch.Tensor
    slot_N: torch.Tensor
    column_N: torch.Tensor
    """Columns that keys and values are written to."""
    groups: list[RowGroup]
    spans: Spans | None = None
    """How rows attend on CUDA, instead of groups."""
    repeats: tuple[torch.Tensor, torch.Tensor] | None = None
    """The places of the tokens that differ from all before, and for each token which of them it equals, if
    some are equal: rows whose tokens are the same so far."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows of any length that attend in one call of a flash kernel. All tensors are int32."""

    ends: torch.Tensor
    """Where each row's tokens begin in the pass, and where the last row's end, [R + 1]."""
    slots: torch.Tensor
    """Slot of each row, [R]."""
    lengths: torch.Tensor
    """Number of tokens of each row, with this pass, [R]."""
    longest: int
    """Maximum number of a row's tokens in the pass."""


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
    ids, positions, slots, same = list[int](), list[int](), list[int](), list[int]()
    last, groups, known = [0] * len(rows), list[RowGroup](), dict[tuple[int, ...], int]()
    for members, shared in parts:
        for index in members:
            row, count = rows[index], counts[index]
            same += range(len(ids), len(ids) + count)
            if count == row.pending == 1:
                same[-1] = known.setdefault((*row.ids,), same[-1])
            ids += row.ids[row.cached : row.cached + count]
            last[index] = len(ids) - 1
            positions += range(row.cached, row.cached + count)
            slots += [row.slot] * count
        groups.append(inputs.group([(rows[index], counts[index]) for index in members], shared))
    ids_N, position_N, slot_N, same_N = tensor([ids, positions, slots, same])
    different_D, equal_N = torch.unique(same_N, return_inverse=True)
    repeats = (different_D, equal_N) if len(different_D) < len(same_N) else None
    return RaggedInputs(ids_N, position_N, slot_N, position_N, groups, repeats=repeats), last


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
