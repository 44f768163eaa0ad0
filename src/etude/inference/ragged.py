"""Ragged passes: so many new tokens of each row, one after the other, and whose attention is one call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from etude.inference.kv_slots import InputMaker, Slots, StepInputs, StepPlan, span_of, tensor
from etude.inference.sampler import Row

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


def padded(inputs: StepInputs, plan: StepPlan) -> Ragged:
    """All rows in one group, padding included."""
    rows, width = inputs.ids_BT.shape
    group = Group(slice(0, rows * width), (rows, width), None, plan.slots, plan.span, inputs.masks)
    slot_BT = plan.rows[:, None].expand(-1, width)
    ids_N, position_N = inputs.ids_BT.flatten(), inputs.position_BT.flatten()
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
        is_alone = attends_alone(row.cached + count, count, size)
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


def attends_alone(length: int, count: int, size: int) -> bool:
    """Whether the last `count` tokens of a row of this length attend apart from those of others."""
    return length * size >= _ALONE or length * count >= _ALONE_SCORES


def _group(own: Sequence[tuple[Row, int]], first: int, inputs: InputMaker) -> Group:
    """Of rows in the order of their slots, and their counts; the first token of the first is given."""
    before = numpy.array([row.cached for row, _ in own])[:, None]
    count_B1 = numpy.array([count for _, count in own])[:, None]
    width, span = int(count_B1.max()), span_of(int((before + count_B1).max()))
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
