"""Steps that add one token to each row, for as long as the same rows do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etude.inference.fused_llama import FusedLlama
from etude.inference.kv_slots import KvSlots, StepPlan
from etude.inference.step_inputs import tensor

_CPU = torch.device("cpu")


class SingleTokens:
    """What stays the same from step to step is made once, and what a token changes is counted up in place.

    The rows are in the first slots, where keys and values are read without a copy.
    """

    def __init__(self, model: FusedLlama, kv: KvSlots, positions: Sequence[int], span: int) -> None:
        """The first step has tokens at `positions`; while it goes on, all of them are within `span`."""
        model.reach(kv.columns)
        self._model = model
        self._positions = [position - 1 for position in positions]
        self._memory = span, kv.slots, kv.columns
        rows, groups = len(positions), model.groups
        before_B = tensor(self._positions, _CPU)
        kv.plan = StepPlan(torch.arange(rows), before_B[:, None], span, leading=True)
        before_M = before_B[:, None].expand(rows, groups).flatten()
        self._numbers = torch.cat([before_B, before_M, kv.places(groups)])
        sizes = [rows, rows * groups, rows * groups]
        self._position_B, position_M, self._place_M = torch.split(self._numbers, sizes)
        self._position_M1 = position_M[:, None]
        hidden_MS = torch.arange(span) > self._position_M1
        self._mask_MS = hidden_MS * torch.tensor(torch.finfo(torch.float32).min)
        self._mask_M1S = self._mask_MS[:, None]
        self._room = model.room(rows)
        self._layers = []
        for layer, held in zip(model.layers, kv.layers, strict=True):
            by_token = held.by_token(groups, model.size)
            keys, values = held.seen()
            self._layers.append((layer, by_token, keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)))

    def goes_on(self, positions: Sequence[int], span: int, kv: KvSlots) -> bool:
        """Whether what is kept is right for a step with tokens at `positions`."""
        known = self._memory == (span, kv.slots, kv.columns)
        return known and self._positions == [position - 1 for position in positions]

    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [B, V] after one more token of each row."""
        model, room = self._model, self._room
        self._positions = [position + 1 for position in self._positions]
        self._numbers.add_(1)
        self._mask_MS.scatter_(1, self._position_M1, 0.0)
        turn = model.turn(self._position_B)
        model.embed(tensor(ids, _CPU), room)
        for layer, by_token, keys_MDS, values_MSD in self._layers:
            model.project(layer, room, turn)
            by_token.index_copy_(0, self._place_M, room.new)
            weight_MRS = torch.softmax(torch.baddbmm(self._mask_M1S, room.query, keys_MDS), dim=-1)
            torch.bmm(weight_MRS, values_MSD, out=room.mixed_by_group)
            model.finish(layer, room)
        return model.logits(room.x)
