"""The plain way to run sequences through a model: right-padded micro-batches.

Correct for any causal language model, because what stands to the right of a token cannot touch it.
It is the baseline that every faster way must equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from etude.core.sample import Sample
from etude.learner.head import Head, head_logits, last_hidden, selective_logprobs
from etude.learner.objective import MicroBatch, Pass, Unit
from etude.learner.packing import Row
from etude.models.architecture import logits_after, text_config

Shares: TypeAlias = tuple[float, float]
"""`unit_share` and `token_share` of a step; see `MicroBatch`."""


def padded_passes(
    units: Sequence[Unit],
    factors: Sequence[Sequence[float]],
    shares: Shares,
    token_budget: int,
    device: torch.device,
    plain_head: bool,
) -> Iterator[Pass]:
    """Cut an optimiser step into micro-batches of at most `token_budget` padded tokens.

    Units of like length go together. A unit is never split, and one above the budget goes alone.
    `factors` and `shares` are those of the whole step; see `Objective.normalised`. Unless the model
    `has_plain_head`, it makes the logits after all tokens that any row of a micro-batch trains on.
    """
    numbers = count()
    rows_of = [[next(numbers) for _ in unit] for unit in units]

    def padded(batch: Sequence[int]) -> Pass:
        rows = tuple(row for index in batch for row in rows_of[index])
        return _padded(
            [units[i] for i in batch], [factors[i] for i in batch], rows, shares, device, plain_head
        )

    order = by_length(units)
    batch: list[int] = []
    rows = 0
    for index in order:
        longest = max(len(sample.ids) for sample in units[index])
        rows += len(units[index])
        if batch and rows * longest > token_budget:
            yield padded(batch)
            batch, rows = [], len(units[index])
        batch.append(index)
    if batch:
        yield padded(batch)


def by_length(units: Sequence[Unit]) -> list[int]:
    """Indices of units, the shortest first."""
    return sorted(range(len(units)), key=lambda index: max(len(sample.ids) for sample in units[index]))


def padded_row(units: Sequence[Unit]) -> Row:
    """The units of a step for dealing; nothing is shared. Padding to like lengths costs little."""
    order = by_length(units)
    costs = tuple(sum(len(sample.ids) for sample in units[index]) for index in order)
    return Row(tuple(order), costs, costs)


def token_share(units: Sequence[Unit]) -> float:
    """One over the trained tokens of a step, as `MicroBatch` has it."""
    trained = sum(1 for unit in units for sample in unit for weight in sample.loss_weights if weight)
    return 1.0 / max(trained, 1)


def micro_batch(
    tensor: Callable[[Callable[[Sample], Sequence[float]]], torch.Tensor],
    scales: Sequence[float],
    shares: Shares,
) -> MicroBatch:
    """Of rows whose fields `tensor` pads, and whose weights are scaled."""
    weights_BT = tensor(lambda sample: sample.loss_weights)
    return MicroBatch(
        weights_BT=weights_BT * torch.tensor(scales, device=weights_BT.device)[:, None],
        advantages_BT=tensor(lambda sample: sample.gains),
        # 0 where nobody knows, as for what is imitated.
        sampled_BT=tensor(lambda sample: sample.logprobs or (0.0,) * len(sample.ids)),
        unit_share=shares[0],
        token_share=shares[1],
    )


def _padded(
    units: Sequence[Unit],
    factors: Sequence[Sequence[float]],
    rows: tuple[int, ...],
    shares: Shares,
    device: torch.device,
    plain_head: bool,
) -> Pass:
    samples = [sample for unit in units for sample in unit]
    width = max(len(sample.ids) for sample in samples)

    def tensor(
        field: Callable[[Sample], Sequence[float]], padding: float = 0, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        filled = [[*field(sample), *[padding] * (width - len(sample.ids))] for sample in samples]
        return torch.tensor(filled, dtype=dtype, device=device)

    micro = micro_batch(tensor, [factor for unit in factors for factor in unit], shares)
    ids_BT = tensor(lambda sample: sample.ids, dtype=torch.long)
    temperatures_BT = tensor(lambda sample: sample.temperatures, 1.0)
    trained_BK = micro.weights_BT[:, 1:] != 0
    return Pass(micro, _Forward(ids_BT, temperatures_BT[:, 1:][trained_BK], trained_BK, plain_head), rows)


@dataclass(frozen=True, slots=True)
class _Forward:
    """Rows of tokens, and the E that are trained on."""

    ids_BT: torch.Tensor
    temperatures_E: torch.Tensor
    """At which each of them was sampled."""
    trained_BK: torch.Tensor
    """Which they are, after the first of each row."""
    plain_head: bool

    def chosen(self, model: Any, *, entropies: bool) -> torch.Tensor:
        """The choice of each trained token, given those before it."""
        vocabulary = text_config(model).vocab_size
        positions = self.trained_BK.any(dim=0).nonzero().flatten()
        head: Head = partial(head_logits, model)
        if self.plain_head:
            states_BKD = last_hidden(model, self.ids_BT)[:, positions]
        else:
            head, states_BKD = (lambda logits: logits), logits_after(model, self.ids_BT, positions)
        states_ED = states_BKD[self.trained_BK[:, positions]]
        targets_E = self.ids_BT[:, 1:][self.trained_BK]
        return selective_logprobs(
            head, states_ED, targets_E, self.temperatures_E, vocabulary, entropies=entropies
        )

    def by_rows(self, values_E: torch.Tensor) -> torch.Tensor:
        """[B, T], with zeros for other tokens."""
        values_BK = values_E.new_zeros(self.trained_BK.shape).masked_scatter(self.trained_BK, values_E)
        return F.pad(values_BK, (1, 0))
