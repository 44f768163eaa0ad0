"""Steps that add one token to each row, for as long as the same rows do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from etude.inference.fused_llama import FusedLlama, as_batch, attend
from etude.inference.kv_slots import KvSlots
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
        before_M = numpy.array(self._positions, numpy.int64).repeat(groups)
        place_M = before_M + kv.columns * numpy.arange(rows * groups)
        self._numbers = torch.from_numpy(numpy.stack([before_M, place_M]))
        position_M, self._place_M = self._numbers
        self._position_B, self._position_M1 = position_M[::groups], position_M[:, None]
        hidden_MS = torch.arange(span) > self._position_M1
        self._mask_MS = hidden_MS * torch.tensor(torch.finfo(torch.float32).min)
        self._mask_M1S = self._mask_MS[:, None]
        self._room = model.room(rows)
        self._layers = []
        for layer, held in zip(model.layers, kv.layers, strict=True):
            by_token = held.by_token(groups, model.size)
            self._layers.append((layer, by_token, *as_batch(*held.first(rows, span))))

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
            attend(room, keys_MDS, values_MSD, self._mask_M1S)
            model.finish(layer, room)
        return model.logits(room.x)
