"""The seam between the learner and the maths of a method.

An objective sees padded tensors and gives a scalar. Weights are normalised over the whole optimiser
step before it is called, so micro-batches just add up. How the sequences go through the model is none of
its business: see `etude.learner.padding` and `etude.learner.packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from etude.core.sample import Sample
from etude.learner.head import Head, Shapes, selective_logprobs
from etude.models.architecture import text_config
from etude.store.learned import Seen

Unit: TypeAlias = Sequence[Sample]
"""Samples that must be learned from together: one, or (chosen, rejected)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded tensors of a few units: a row is a sequence, and an entry about the choice of one token.

    Tokens that are not trained on are left out; entries of padding have weight 0.
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
    start_BT: torch.Tensor | None = None
    """Logprobs under the weights that a job of several steps began with, where the objective wants them."""


States: TypeAlias = Callable[[Any], tuple[Head, torch.Tensor]]
"""Of a model its head, and its states [Q, D] after those tokens that something is chosen after."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A micro-batch of B rows, and the E different choices of a token that these are made of.

    Each choice is computed once, whichever rows have it.
    """

    micro: MicroBatch
    rows: tuple[int, ...]
    """Which sequences the rows are, counted through all units that were cut."""
    states: States
    after_E: torch.Tensor
    """After which of the states it was chosen."""
    targets_E: torch.Tensor
    """The token that was chosen."""
    shapes_E: Shapes
    """Of the distributions that they were drawn from."""
    choices_BT: torch.Tensor
    """Which of the choices each entry is, and E for padding."""

    def logprobs(self, model: Any) -> torch.Tensor:
        """The logprobs [B, T] of the micro-batch's tokens, with gradient."""
        return self._by_rows(self._chosen(model, entropies=False))

    def with_entropies(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the entropies [B, T] of the distributions that they are of."""
        logprobs_E, entropies_E = self._chosen(model, entropies=True)
        return self._by_rows(logprobs_E), self._by_rows(entropies_E)

    def _chosen(self, model: Any, *, entropies: bool) -> torch.Tensor:
        """Logprobs [E] of the choices; with `entropies` [2, E], those of the distributions below them."""
        head, states_QD = self.states(model)
        states_ED, vocabulary = states_QD.index_select(0, self.after_E), text_config(model).vocab_size
        return selective_logprobs(
            head, states_ED, self.targets_E, self.shapes_E, vocabulary, entropies=entropies
        )

    def trained(self, values_BT: torch.Tensor) -> list[list[float]]:
        """The values of each row's trained tokens, in their order."""
        # Off the device at once: to wait for it row by row takes longer than the rows do.
        values_BT, trained_BT = values_BT.detach().cpu(), self.micro.weights_BT.cpu() != 0
        return [values_T[own_T].tolist() for values_T, own_T in zip(values_BT, trained_BT, strict=True)]

    def _by_rows(self, values_E: torch.Tensor) -> torch.Tensor:
        """Values of the choices as entries of the micro-batch, with zeros for padding."""
        values_F = F.pad(values_E, (0, 1))
        return values_F.index_select(0, self.choices_BT.flatten()).view(self.choices_BT.shape)


class Objective(Protocol):
    """The learner's view of an algorithm."""

    @property
    def skips_idle(self) -> bool:
        """Whether units without advantage have no gradient and need not be computed."""

    def needs(self) -> Collection[str]:
        """With `reference` among them, `reference_BT` must be there; with `entropy`, `entropy_BT`; with
        `start`, in a job of several steps, `start_BT`."""

    def normalised(self, units: Sequence[Unit]) -> list[list[float]]:
        """For every sample of an optimiser step, the factor of its weights."""

    def loss(self, logprobs_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """The micro-batch's share of the step's loss, and its share of the step's metrics.

        `logprobs_BT` are those of the policy in training, with gradient.
        """


def has_gradient(unit: Unit) -> bool:
    """Whether there is something to learn from a unit."""
    return any(sample.has_gradient for sample in unit)


def is_trained(unit: Unit) -> bool:
    """Whether any token of a unit is trained on."""
    return any(any(sample.loss_weights) for sample in unit)


def trained_tokens(units: Iterable[Unit]) -> int:
    """Tokens that are trained on."""
    return sum(1 for unit in units for sample in unit for weight in sample.loss_weights if weight)


def from_start(chunk: Pass, logprobs: Iterable[Sequence[float]]) -> Pass:
    """The pass with `start_BT`, of the logprobs of each row's trained tokens, in their order."""
    weights_BT = chunk.micro.weights_BT
    trained_BT = weights_BT.cpu() != 0
    values = torch.tensor([*chain.from_iterable(logprobs)])
    start_BT = torch.zeros(trained_BT.shape).masked_scatter(trained_BT, values)
    return replace(chunk, micro=replace(chunk.micro, start_BT=start_BT.to(weights_BT.device)))


class Witness:
    """Sees each step of a learner, and keeps the first sight of each sample, which is in the loss."""

    def __init__(self) -> None:
        self.seen: dict[int, Seen] = {}
        """By `id` of a sample, which whoever has the witness keeps alive."""
        self._samples: Sequence[Sample] = ()

    def begin(self, units: Sequence[Unit]) -> None:
        """A step on these units begins; the rows of its passes are counted through their samples."""
        self._samples = [sample for unit in units for sample in unit]

    def saw(self, chunk: Pass, logprobs_BT: torch.Tensor, entropies_BT: torch.Tensor | None) -> None:
        """A pass of the step was computed."""
        entropies = [()] * len(chunk.rows) if entropies_BT is None else chunk.trained(entropies_BT)
        for number, *own in zip(chunk.rows, chunk.trained(logprobs_BT), entropies, strict=True):
            self.seen.setdefault(id(self._samples[number]), Seen(*own))
