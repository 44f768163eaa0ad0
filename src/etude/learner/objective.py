"""The seam between the learner and the maths of a method.

An objective sees padded tensors and gives a scalar. Weights are normalised over the whole optimiser
step before it is called, so micro-batches just add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from etude.learner.batch import TokenSequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded tensors of a few units. Position t of a [B, T] tensor is about predicting token t."""

    ids_BT: torch.Tensor
    weights_BT: torch.Tensor
    advantages_BT: torch.Tensor
    sampled_BT: torch.Tensor
    """Logprobs under the policy that sampled."""
    temperature_BT: torch.Tensor
    """Temperature of each token's distribution."""
    unit_share: float
    """One over the units of the optimiser step; a preference is a unit of two neighbouring rows."""
    token_share: float
    """One over the trained tokens that the optimiser step computes: for metrics, which are plain means."""
    reference_BT: torch.Tensor | None = None
    """Logprobs under the reference model, where the objective wants them."""


class Objective(Protocol):
    """A method of training."""

    @property
    def needs_reference(self) -> bool:
        """Whether `reference_BT` must be there."""

    @property
    def skips_idle(self) -> bool:
        """Whether units without advantage have no gradient and need not be computed."""

    def normalised(self, units: Sequence[Sequence[TokenSequence]]) -> list[list[float]]:
        """For every sequence of an optimiser step, the factor of its weights."""

    def loss(self, logprobs_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """The micro-batch's share of the step's loss, and its share of the step's metrics.

        `logprobs_BT` are those of the policy in training, with gradient.
        """
