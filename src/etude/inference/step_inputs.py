"""What a forward pass over key-value slots is given: tokens, positions, masks, places to read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import ArrayLike

from etude.inference.kv_slots import KvSlots, StepPlan
from etude.inference.row import Row
from etude.models.architecture import SLIDING, layer_kinds, text_config
from etude.models.policy import Policy


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Of one forward pass."""

    ids_BT: torch.Tensor
    position_BT: torch.Tensor
    masks: dict[str, torch.Tensor]
    """Additive, [B, 1, T, span], by kind of layer."""
    plan: StepPlan


class InputMaker:
    """Makes inputs for one model."""

    def __init__(self, policy: Policy) -> None:
        self._device = policy.device
        self._kinds = set(layer_kinds(policy.model))
        window = getattr(text_config(policy.model), "sliding_window", None)
        self._window: int | None = window if SLIDING in self._kinds else None
        dtype = next(policy.model.parameters()).dtype
        self._hide = torch.tensor(torch.finfo(dtype).min, dtype=dtype, device=policy.device)
        self._columns = torch.arange(0)

    def padded(
        self, rows: Sequence[Row], slots: Sequence[int], shape: tuple[int, int], kv: KvSlots, *, leading: bool
    ) -> StepInputs:
        """For up to as many tokens of each row as `shape`, width and span, allows.

        They are padded on the left, and where there are more slots than rows, with rows of padding.
        `leading` says whether the slots are 0…B-1 and may be read in place.
        """
        width, span = shape
        numbers_3BT = numpy.zeros((3, len(slots), width), numpy.int64)
        numbers_3BT[2] = kv.waste
        for index, row in enumerate(rows):
            end = min(row.cached + width, len(row.ids))
            new = numbers_3BT[:, index, width - end + row.cached :]
            new[0], new[1:] = row.ids[row.cached : end], numpy.arange(row.cached, end)
        ids_BT, position_BT, column_BT = tensor(numbers_3BT, self._device)
        plan = StepPlan(tensor(slots, self._device), column_BT, span, leading)
        return StepInputs(ids_BT, position_BT, self._masks(position_BT, span), plan)

    def looks_back(self, span: int) -> bool:
        """Whether every layer looks back over so many tokens."""
        return self._window is None or self._window >= span

    def _masks(self, position_BT: torch.Tensor, span: int) -> dict[str, torch.Tensor]:
        if len(self._columns) < span:
            self._columns = torch.arange(span, device=self._device)
        column_S, last_B1T1 = self._columns[:span], position_BT[:, None, :, None]
        hidden_B1TS = column_S > last_B1T1
        masks = dict.fromkeys(self._kinds, hidden_B1TS * self._hide)
        if self._window is not None and self._window < span:
            masks[SLIDING] = (hidden_B1TS | (column_S <= last_B1T1 - self._window)) * self._hide
        return masks


def tensor(numbers: ArrayLike, device: torch.device) -> torch.Tensor:
    """Integers as `torch.tensor` gives them, which takes five times as long for lists."""
    return torch.from_numpy(numpy.asarray(numbers, numpy.int64)).to(device)
