"""Recomputing every sequence at every step: slow, and right for any causal model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etude.inference.row import Row
from etude.inference.sampler import append_samples
from etude.models.architecture import logits_after
from etude.models.policy import Policy


class RecomputeDecoder:
    """Keeps nothing between two steps, for models whose layers hold more than keys and values.

    With `deterministic`, every row is read alone: then its numbers do not depend on its neighbours.
    """

    def __init__(self, policy: Policy, *, deterministic: bool) -> None:
        self._policy = policy
        self._deterministic = deterministic

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Row]:
        """See `Decoder.step`: every row gains a token."""
        for batch in [[row] for row in rows] if self._deterministic else [rows]:
            append_samples(batch, self._logits(batch))
        return list(rows)

    def release(self, row: Row) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing is kept."""

    def _logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [B, V] after each row's last token."""
        device = self._policy.device
        width = max(len(row.ids) for row in rows)
        last = [len(row.ids) - 1 for row in rows]
        kept = sorted(set(last))
        padded = [row.ids + [0] * (width - len(row.ids)) for row in rows]
        logits_BKV = logits_after(
            self._policy.model, torch.tensor(padded, device=device), torch.tensor(kept, device=device)
        )
        return logits_BKV[range(len(rows)), [kept.index(position) for position in last]]
