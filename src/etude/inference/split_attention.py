"""Attention of single tokens, one of each row, in two parts: to prefixes that rows share, and to the rest.

A prefix that rows share is attended to by the queries of all of them at once, with the keys and values of
one. What they find there then counts as one column more of what each row attends to by itself: its score is
the logarithm of the sum of the exponentials of the prefix's scores, and its value the average of the prefix's
values. So one softmax is over both, and the result is exact up to rounding. In bfloat16, where scores that
are stored would be rounded, each part has a softmax of its own, and the two results are averaged in float32:
the weights are in the ratio of the sums of exponentials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from etude.inference.fused_llama import FusedLlama, Room, as_batch, attend, flash_attention
from etude.inference.kv_slots import SlotLayer, tensor
from etude.inference.shared_prefixes import Prefix, Reading, Run

Held: TypeAlias = tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]
"""Keys and values of a layer: of each prefix, and of each run."""


class SplitAttention:
    """By a plan, of rows that have a room for themselves. Its tensors are made once."""

    def __init__(self, model: FusedLlama, room: Room, plan: Reading) -> None:
        self._plan, self._room, self._scale = plan, room, model.scale
        self._columns = torch.arange(max(run.end for run in plan.runs))
        self._hide = torch.tensor(torch.finfo(model.dtype).min, dtype=model.dtype)
        self._mask_MS = torch.empty(len(room.query), len(self._columns), dtype=model.dtype)
        self._prefixes = _Prefixes(model, room, plan.prefixes) if plan.prefixes else None
        self._own = [_Own(room, self._mask_MS, run, self._prefixes) for run in plan.runs]

    def held(self, layer: SlotLayer) -> Held:
        """Keys and values that are read, of a layer."""
        slots = self._plan.slots
        prefixes = [prefix.keys_and_values(layer, slots) for prefix in self._plan.prefixes]
        return prefixes, [as_batch(*run.keys_and_values(layer, slots)) for run in self._plan.runs]

    def look(self, position_M1: torch.Tensor) -> None:
        """Look back from these positions, of each row and group of heads."""
        is_hidden_MS = self._columns > position_M1
        if self._prefixes is not None:
            is_hidden_MS |= self._columns < self._prefixes.column_M1
        torch.mul(is_hidden_MS, self._hide, out=self._mask_MS)

    def look_at(self, position_M1: torch.Tensor) -> None:
        """Look at these positions too."""
        self._mask_MS.scatter_(1, position_M1, 0.0)

    def __call__(self, held: Held) -> None:
        """Attend to what is held of a layer."""
        shared, own = held
        if self._prefixes is not None:
            self._prefixes.attend(self._room.query, shared)
        for run, read in zip(self._own, own, strict=True):
            run.attend(*read, self._scale)
        if self._prefixes is not None:
            self._prefixes.add(self._room.mixed_by_group)


def once(
    model: FusedLlama, plan: Reading, positions: Sequence[int], room: Room
) -> Callable[[SlotLayer], None]:
    """In the first places of a room, for one pass, of tokens at these positions."""
    attend_to = SplitAttention(model, room.first(len(positions)), plan)
    attend_to.look(tensor(positions).repeat_interleave(model.groups)[:, None])
    return lambda layer: attend_to(attend_to.held(layer))


class _Prefixes:
    """Attention to the prefixes, for all rows that have one."""

    def __init__(self, model: FusedLlama, room: Room, prefixes: Sequence[Prefix]) -> None:
        self._groups, self._scale = model.groups, model.scale
        self._rows = [tensor(prefix.rows) for prefix in prefixes]
        head_G1 = torch.arange(model.groups)[:, None]
        places = [(rows * model.groups + head_G1).flatten() for rows in self._rows]
        self._place_K, self._counts = torch.cat(places), [len(own) for own in places]
        self._value_MRD = torch.zeros(room.query.shape, dtype=model.dtype)
        """The result of each head in its row's prefix; zeros where that has none."""
        self.score_MR1 = torch.zeros(*room.query.shape[:2], 1)
        self.weight_MR1 = torch.zeros_like(self.score_MR1)
        """Of that in the head's result. Runs write it."""
        is_wide = model.dtype == torch.float32
        self.own_MRD = room.mixed_by_group if is_wide else torch.zeros(room.query.shape)
        """The rest of that, in float32. Runs write it."""
        self.column_M1 = torch.zeros(len(room.query), 1, dtype=torch.long)
        """The first that a row looks at by itself; in float32 its prefix's last, for the score to take."""
        for prefix, own in zip(prefixes, places, strict=True):
            self.column_M1[own] = prefix.length - is_wide

    def attend(self, query_MRD: torch.Tensor, held: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """To keys and values [1, G, L, D] of each prefix."""
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
        """Write the result of both parts."""
        torch.addcmul(self.own_MRD, self.weight_MR1, self._value_MRD, out=mixed_MRD)


class _Own:
    """Attention of neighbours to what each of them has for itself."""

    def __init__(self, room: Room, mask_MS: torch.Tensor, run: Run, prefixes: _Prefixes | None) -> None:
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
        """Write what comes of it, and which part the rows' prefixes have beside it."""
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
