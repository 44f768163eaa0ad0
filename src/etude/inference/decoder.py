"""Decoders: run the model one step, rows of token ids in, one more sampled token for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from etude.inference.ragged_decoder import RaggedDecoder
from etude.inference.sampler import Row, append_samples
from etude.inference.slot_decoder import SlotDecoder, cuda_graphs, fuses
from etude.models.architecture import logits_after, takes_key_value_slots
from etude.models.policy import Policy


def make_decoder(policy: Policy, *, slots: int, deterministic: bool) -> Decoder:
    """The fastest decoder that is right for the policy's architecture."""
    if deterministic and policy.device.type == "cpu":
        # How many threads share a sum, and how, would depend on what else the machine does.
        torch.set_num_threads(1)
    if not takes_key_value_slots(policy.model):
        return RecomputeDecoder(policy, deterministic=deterministic)
    if deterministic or not fuses(policy):
        records = policy.device.type == "cuda" and not deterministic
        record = cuda_graphs(policy.device) if records else None
        return SlotDecoder(policy, slots=slots, deterministic=deterministic, record=record)
    return RaggedDecoder(policy, slots=slots)


class RecomputeDecoder:
    """Keeps nothing between two steps, for models whose layers hold more than keys and values.

    With `deterministic`, every row is read alone: then its numbers do not depend on its neighbours.
    """

    def __init__(self, policy: Policy, *, deterministic: bool) -> None:
        self._policy = policy
        self._deterministic = deterministic

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Row]:
        """Append a token to every row. Returns the rows that gained one: all."""
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


Decoder: TypeAlias = SlotDecoder | RaggedDecoder | RecomputeDecoder
