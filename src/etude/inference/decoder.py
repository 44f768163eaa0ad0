"""A decoder: runs the model one step, rows of token ids in, one more sampled token for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from etude.inference.recompute_decoder import RecomputeDecoder
from etude.inference.row import Row
from etude.inference.slot_decoder import SlotDecoder
from etude.models.architecture import takes_key_value_slots
from etude.models.policy import Policy

__all__ = ["Decoder", "RecomputeDecoder", "Row", "SlotDecoder", "make_decoder"]


class Decoder(Protocol):
    """Runs the model."""

    def step(self, rows: Sequence[Row]) -> list[Row]:
        """Read pending tokens of some rows, and append a token to each row that has been read whole.

        Returns the rows that gained a token. Raises EngineError when the logits are not finite.
        """

    def release(self, row: Row) -> None:
        """The row is finished or cancelled. What was read of it may serve its conversation's next turn."""

    def forget(self) -> None:
        """The weights changed: nothing kept is valid. Rows in flight are read again from their start."""


def make_decoder(policy: Policy, *, slots: int, deterministic: bool) -> Decoder:
    """The fastest decoder that is right for the policy's architecture."""
    if deterministic and policy.device.type == "cpu":
        # How many threads share a sum, and how, would depend on what else the machine does.
        torch.set_num_threads(1)
    if takes_key_value_slots(policy.model):
        return SlotDecoder(policy, slots=slots, deterministic=deterministic)
    return RecomputeDecoder(policy, deterministic=deterministic)
