"""The interface between the learner and an algorithm's loss.

An objective gets padded tensors and returns a scalar. Weights are normalised over the whole optimiser step
beforehand, so micro-batches just add up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from etude.core.sample import Unit
from etude.learner.head import Head, Shapes, selective_logprobs
from etude.models.architecture import text_config


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded tensors of a few units: a row is a sequence, and each entry is the choice of one token.

    Tokens that are not trained on are left out. Padding has weight 0.
    """

    weights_BT: torch.Tensor
    advantages_BT: torch.Tensor
    sampled_BT: torch.Tensor
    """Logprobs under the policy that sampled."""
    unit_share: float
    """One over the number of units in the optimiser step; a preference is a unit of two adjacent rows."""
    token_share: float
    """One over the number of trained tokens in the optimiser step's passes, for metrics as plain means."""
    reference_BT: torch.Tensor | None = None
    """Logprobs under the reference model, if the objective needs them."""
    start_BT: torch.Tensor | None = None
    """Logprobs under the weights at the start of a job of several steps, if the objective needs them."""


States: TypeAlias = Callable[[Any], tuple[Head, torch.Tensor]]
"""Returns a model's head, and its states [Q, D] after the tokens that precede a choice."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A micro-batch of B rows, which consist of E different choices of a token.

    Each choice is computed once, however many rows have it.
    """

    micro: MicroBatch
    rows: tuple[int, ...]
    """The rows' sequences, as indices among the samples of all units that were cut."""
    states: States
    after_E: torch.Tensor
    """Index of the state after which each token was chosen."""
    targets_E: torch.Tensor
    """The chosen tokens."""
    shapes_E: Shapes
    """Shapes of the distributions that the tokens were drawn from."""
    choices_BT: torch.Tensor
    """Index of each entry's choice; E for padding."""

    def logprobs(self, model: Any) -> torch.Tensor:
        """Return the logprobs [B, T] of the micro-batch's tokens, with gradient; zeros for padding."""
        head, states_QD = self.states(model)
        states_ED, vocabulary = states_QD.index_select(0, self.after_E), text_config(model).vocab_size
        logprobs_E = selective_logprobs(head, states_ED, self.targets_E, self.shapes_E, vocabulary)
        logprobs_F = F.pad(logprobs_E, (0, 1))
        return logprobs_F.index_select(0, self.choices_BT.flatten()).view(self.choices_BT.shape)

    def select(self, values_BT: torch.Tensor) -> list[list[float]]:
        """Return the values of each row's trained tokens, in order."""
        # Copy all rows at once: waiting for the device row by row takes longer than the rows.
        values_BT, trained_BT = values_BT.detach().cpu(), self.micro.weights_BT.cpu() != 0
        return [values_T[own_T].tolist() for values_T, own_T in zip(values_BT, trained_BT, strict=True)]


class Objective(Protocol):
    """An algorithm as the learner sees it."""

    @property
    def skips_idle(self) -> bool:
        """Whether units without advantage have no gradient and need not be computed."""

    def needs(self) -> Collection[str]:
        """Return the tensors that the loss needs: `reference` is `reference_BT`, `start` is `start_BT`."""

    def weight_factors(self, units: Sequence[Unit]) -> list[list[float]]:
        """Return, for every sample of an optimiser step, the factor of its weights."""

    def loss(self, logprobs_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the micro-batch's share of the step's loss, and its share of the step's metrics.

        `logprobs_BT` come from the policy in training, with gradient.
        """


def with_start_logprobs(chunk: Pass, logprobs: Iterable[Sequence[float]]) -> Pass:
    """Return the pass with `start_BT`, made from the logprobs of each row's trained tokens, in order."""
    weights_BT = chunk.micro.weights_BT
    trained_BT = weights_BT.cpu() != 0
    values = torch.tensor([*chain.from_iterable(logprobs)])
    start_BT = torch.zeros(trained_BT.shape).masked_scatter(trained_BT, values)
    return replace(chunk, micro=replace(chunk.micro, start_BT=start_BT.to(weights_BT.device)))
