"""Steps that add one token to each row: whatever stays the same from step to step is made once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from etude.inference.fused_llama import FusedLlama
from etude.inference.kv_slots import KvSlots, tensor
from etude.inference.sampler import Row
from etude.inference.shared_prefixes import plan_of
from etude.inference.split_attention import SplitAttention


class SingleTokens:
    """Makes its tensors once, and counts up in place whatever a token changes.

    The rows are in the first slots, where keys and values are read without a copy.
    """

    def __init__(self, model: FusedLlama, kv: KvSlots, rows: Sequence[Row]) -> None:
        """For these rows, in the order of their slots, until one of them outgrows what is read of it."""
        model.reach(kv.columns)
        self._model, self._room = model, model.room(len(rows))
        self._rows = list(rows)
        self._positions: list[int] = []
        """Of the tokens read last."""
        self._memory = kv.slots, kv.columns
        ids, cached = [row.ids for row in rows], [row.cached for row in rows]
        plan = plan_of(ids, cached, range(len(rows)), 2 * model.key_size)
        self._ends = [(run.rows, run.end) for run in plan.runs]
        self._numbers = torch.empty(2, len(rows) * model.groups, dtype=torch.long)
        position_M, self._place_M = self._numbers
        self._position_B, self._position_M1 = position_M[:: model.groups], position_M[:, None]
        self._attend = SplitAttention(model, self._room, plan)
        self._layers = []
        for kind, layer, held in zip(model.kinds, model.layers, kv.layers, strict=True):
            by_token = held.by_token(model.groups, model.size, model.dtype)
            self._layers.append((kind, layer, by_token, self._attend.held(held)))

    def serves(self, rows: Sequence[Row], positions: Sequence[int], kv: KvSlots) -> bool:
        """Whether what is kept is right for a step of these rows, whose last tokens are at `positions`."""
        return (
            self._rows == rows
            and self._memory == (kv.slots, kv.columns)
            and all(max(positions[own]) < end for own, end in self._ends)
        )

    def __call__(self, positions: Sequence[int]) -> torch.Tensor:
        """Logits [B, V] after the last token of each row, the only one that is not cached."""
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
        """Be where tokens at `positions` were just read."""
        groups, columns = self._model.groups, self._memory[1]
        position_M = numpy.array(positions, numpy.int64).repeat(groups)
        place_M = position_M + columns * numpy.arange(len(position_M))
        self._numbers.copy_(torch.from_numpy(numpy.stack([position_M, place_M])))
        self._attend.look(self._position_M1)
