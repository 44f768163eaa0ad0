"""Key-value slots: a KV cache whose rows are conversations of different lengths.

Every layer holds tensors [slots, heads, columns, head_dim]. A step writes the new keys and values of
its rows at their own columns and attends over what the mask allows, so conversations join and leave
at any step. The last column is a waste bin for the padding of ragged steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_COLUMN_STEP = 64
"""Columns grow by this many, and attention always spans a multiple of it: sums over masked columns
then fall into the same lanes whatever the longest neighbour is, and come out the same bit for bit."""


@dataclass(slots=True)
class StepPlan:
    """Where one forward pass reads and writes."""

    rows: torch.Tensor
    """[B] slot of each row."""
    columns: torch.Tensor
    """[B, T] column that each new token is written to."""
    span: int
    """Columns that attention looks at."""
    leading: bool
    """Whether `rows` is 0…B-1, so that slots can be read without a copy."""


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values."""

    is_sliding = False

    def __init__(self, owner: KvSlots) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the owner's size; shapes [B, H, T, D]."""
        self.keys = self._empty(key_states)
        self.values = self._empty(value_states)
        self.is_initialized = True

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self._owner.slots, like.shape[1], self._owner.columns, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [B, H, T, D]; return those of the step's span [B, H, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._store(self.keys, key_states), self._store(self.values, value_states)

    def _store(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        plan = self._owner.plan
        held[plan.rows[:, None], :, plan.columns] = new.transpose(1, 2)
        if plan.leading:
            return held[: len(plan.rows), :, : plan.span]
        return held[plan.rows, :, : plan.span]

    def resize(self, slots: int, columns: int) -> None:
        """Grow, keeping what is held; the waste bin stays the last column."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._empty(old)
            new[: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]
            setattr(self, name, new)

    def swap(self, first: int, second: int) -> None:
        """Exchange two slots."""
        if self.is_initialized:
            pair, reverse = [first, second], [second, first]
            self.keys[pair] = self.keys[reverse]
            self.values[pair] = self.values[reverse]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the span; masks are made by the caller, so this is for information."""
        return self._owner.plan.span, 0

    def get_seq_length(self) -> int:
        """Rows have lengths of their own; positions are always given by the caller."""
        return 0

    def get_max_length(self) -> int:
        """No maximum: columns grow."""
        return -1

    get_max_cache_shape = get_max_length
    """As earlier releases of `transformers` call it."""


class KvSlots(Cache):  # type: ignore[misc]
    """The slots of all layers. Slots and columns grow on demand and never shrink."""

    def __init__(self, layers: int, slots: int) -> None:
        self.slots = slots
        self.columns = _COLUMN_STEP + 1
        self.plan = StepPlan(torch.zeros(0, dtype=torch.long), torch.zeros(0, 0, dtype=torch.long), 0, True)
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    @property
    def waste(self) -> int:
        """The column that padding is written to."""
        return self.columns - 1

    def reserve(self, slots: int, length: int) -> None:
        """Make room for so many slots and tokens per slot."""
        columns = span_for(length) + 1
        if slots <= self.slots and columns <= self.columns:
            return
        if columns > self.columns:
            # Growing copies everything: a long conversation must not make it happen every few tokens.
            columns = max(columns, span_for(self.columns * 5 // 4) + 1)
        self.slots, self.columns = max(slots, self.slots), max(columns, self.columns)
        for layer in self.layers:
            layer.resize(self.slots, self.columns)

    def swap(self, first: int, second: int) -> None:
        """Exchange two slots in every layer."""
        if first != second:
            for layer in self.layers:
                layer.swap(first, second)


def span_for(length: int) -> int:
    """Columns that attention spans for `length` tokens: the next multiple of the step."""
    return -(-max(length, 1) // _COLUMN_STEP) * _COLUMN_STEP
