"""The seam between the learner and the maths of a method.

An objective sees padded tensors and gives a scalar. Weights are normalised over the whole optimiser
step before it is called, so micro-batches just add up. How the sequences go through the model is none of
its business: see `etude.learner.padding` and `etude.learner.packed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from etude.core.sample import Sample

Unit: TypeAlias = Sequence[Sample]
"""Samples that must be learned from together: one, or (chosen, rejected)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded tensors of a few units: a row is a sequence, and an entry about the choice of one token.

    Tokens that nobody chose have weight 0, or may not be there at all.
    """

    weights_BT: torch.Tensor
    advantages_BT: torch.Tensor
    sampled_BT: torch.Tensor
    """Logprobs under the policy that sampled."""
    unit_share: float
    """One over the units of the optimiser step; a preference is a unit of two neighbouring rows."""
    token_share: float
    """One over the trained tokens that the optimiser step computes: for metrics, which are plain means."""
    reference_BT: torch.Tensor | None = None
    """Logprobs under the reference model, where the objective wants them."""
    entropy_BT: torch.Tensor | None = None
    """Entropies in nats of the distributions that the tokens were chosen from, with gradient, where the
    objective wants them."""


class Forward(Protocol):
    """A way of some sequences through a model, with the E choices that they are trained on."""

    def chosen(self, model: Any, *, entropies: bool) -> torch.Tensor:
        """Logprobs [E] of the choices; with `entropies` [2, E], those of the distributions below them."""

    def by_rows(self, values_E: torch.Tensor) -> torch.Tensor:
        """Values of the choices as entries of the micro-batch, [B, T]."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A micro-batch, and how its sequences go through a model."""

    micro: MicroBatch
    forward: Forward
    rows: tuple[int, ...]
    """Which sequences the rows are, counted through all units that were cut."""

    def logprobs(self, model: Any) -> torch.Tensor:
        """The logprobs [B, T] of the micro-batch's tokens, with gradient."""
        return self.forward.by_rows(self.forward.chosen(model, entropies=False))

    def with_entropies(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the entropies [B, T] of the distributions that they are of."""
        logprobs_E, entropies_E = self.forward.chosen(model, entropies=True)
        return self.forward.by_rows(logprobs_E), self.forward.by_rows(entropies_E)


class Objective(Protocol):
    """The learner's view of an algorithm."""

    @property
    def needs_reference(self) -> bool:
        """Whether `reference_BT` must be there."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy_BT` must be there."""

    @property
    def skips_idle(self) -> bool:
        """Whether units without advantage have no gradient and need not be computed."""

    def normalised(self, units: Sequence[Unit]) -> list[list[float]]:
        """For every sample of an optimiser step, the factor of its weights."""

    def loss(self, logprobs_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """The micro-batch's share of the step's loss, and its share of the step's metrics.

        `logprobs_BT` are those of the policy in training, with gradient.
        """


@dataclass(frozen=True, slots=True)
class Likelihood:
    """L = -Σ w·log π / Σ w: the mean negative log-likelihood of the trained tokens."""

    needs_reference: bool = False
    needs_entropy: bool = False
    skips_idle: bool = False

    def normalised(self, units: Sequence[Unit]) -> list[list[float]]:
        """One over the weight of all tokens of the step."""
        total = sum(sum(sample.loss_weights) for unit in units for sample in unit)
        return [[1.0 / max(total, 1e-9)] * len(unit) for unit in units]

    def loss(self, logprobs_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """The micro-batch's share of that mean, which is the metric `nll` too."""
        loss = -(micro.weights_BT * logprobs_BT).sum()
        return loss, {"nll": float(loss.detach())}
