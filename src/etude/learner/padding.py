"""The plain way to run sequences through a model: right-padded micro-batches.

Correct for any causal language model, because what stands to the right of a token cannot touch it.
It is the baseline that every faster way must equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from etude.learner.batch import TokenSequence
from etude.learner.dealing import Row
from etude.learner.objective import MicroBatch, Pass
from etude.learner.selective import logprobs_and_entropies
from etude.models.architecture import logits_after

Unit = Sequence[TokenSequence]

Shares: TypeAlias = tuple[float, float]
"""`unit_share` and `token_share` of a step; see `MicroBatch`."""


def padded_passes(
    units: Sequence[Unit],
    factors: Sequence[Sequence[float]],
    shares: Shares,
    token_budget: int,
    device: torch.device,
) -> Iterator[Pass]:
    """Cut an optimiser step into micro-batches of at most `token_budget` padded tokens.

    Units of like length go together. A unit is never split, and one above the budget goes alone.
    `factors` and `shares` are those of the whole step; see `Objective.normalised`.
    """
    numbers = count()
    rows_of = [[next(numbers) for _ in unit] for unit in units]

    def padded(batch: Sequence[int]) -> Pass:
        rows = tuple(row for index in batch for row in rows_of[index])
        return _padded([units[i] for i in batch], [factors[i] for i in batch], rows, shares, device)

    order = by_length(units)
    batch: list[int] = []
    rows = 0
    for index in order:
        longest = max(len(sequence.ids) for sequence in units[index])
        rows += len(units[index])
        if batch and rows * longest > token_budget:
            yield padded(batch)
            batch, rows = [], len(units[index])
        batch.append(index)
    if batch:
        yield padded(batch)


def by_length(units: Sequence[Unit]) -> list[int]:
    """Indices of units, the shortest first."""
    return sorted(range(len(units)), key=lambda index: max(len(s.ids) for s in units[index]))


def padded_row(units: Sequence[Unit]) -> Row:
    """The units of a step for dealing; nothing is shared. Padding to like lengths costs little."""
    order = by_length(units)
    costs = tuple(sum(len(sequence.ids) for sequence in units[index]) for index in order)
    return Row(tuple(order), costs, costs)


def token_share(units: Sequence[Unit]) -> float:
    """See `MicroBatch.token_share`."""
    trained = sum(1 for unit in units for sequence in unit for weight in sequence.weights if weight)
    return 1.0 / max(trained, 1)


def _padded(
    units: Sequence[Unit],
    factors: Sequence[Sequence[float]],
    rows: tuple[int, ...],
    shares: Shares,
    device: torch.device,
) -> Pass:
    sequences = [sequence for unit in units for sequence in unit]
    scales = [factor for unit in factors for factor in unit]
    width = max(len(sequence.ids) for sequence in sequences)

    def tensor(field: Callable[[TokenSequence], Sequence[float]], padding: float = 0) -> torch.Tensor:
        filled = [[*field(sequence), *[padding] * (width - len(sequence.ids))] for sequence in sequences]
        return torch.tensor(filled, device=device)

    scale_B1 = torch.tensor(scales, device=device)[:, None]
    micro = MicroBatch(
        weights_BT=tensor(lambda sequence: sequence.weights) * scale_B1,
        advantages_BT=tensor(lambda sequence: sequence.advantages),
        sampled_BT=tensor(lambda sequence: sequence.logprobs),
        unit_share=shares[0],
        token_share=shares[1],
    )
    ids_BT = tensor(lambda sequence: sequence.ids)
    temperatures_BT = tensor(lambda sequence: sequence.temperatures or [1.0] * len(sequence.ids), 1.0)
    trained_T = (micro.weights_BT != 0).any(dim=0)
    first = max(1, int(trained_T.long().argmax())) if bool(trained_T.any()) else 1
    inputs = ids_BT, temperatures_BT, first
    return Pass(micro, partial(_token_logprobs, *inputs), partial(_with_entropies, *inputs), rows)


def _token_logprobs(
    ids_BT: torch.Tensor, temperatures_BT: torch.Tensor, first: int, model: Any
) -> torch.Tensor:
    """Logprobs [B, T] of every token given those before it, at the temperature it was sampled at.

    Zero up to `first`, the first position that any row trains on: logits are made from there on only.
    """
    logits_BKV = _logits(ids_BT, first, model).float()
    logits_BKV = logits_BKV / temperatures_BT[:, first:, None]
    targets_BK = ids_BT[:, first:]
    nll = F.cross_entropy(logits_BKV.flatten(0, 1), targets_BK.flatten(), reduction="none")
    return F.pad(-nll.view(targets_BK.shape), (first, 0))


def _with_entropies(
    ids_BT: torch.Tensor, temperatures_BT: torch.Tensor, first: int, model: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the entropies [B, T] of what was chosen from."""
    logits_BKV = _logits(ids_BT, first, model)
    targets_BK = ids_BT[:, first:]
    found_2E = logprobs_and_entropies(
        lambda logits_EV: logits_EV,
        logits_BKV.flatten(0, 1),
        targets_BK.flatten(),
        temperatures_BT[:, first:].flatten(),
        logits_BKV.shape[-1],
    )
    logprobs_BT, entropies_BT = F.pad(found_2E.view(2, *targets_BK.shape), (first, 0))
    return logprobs_BT, entropies_BT


def _logits(ids_BT: torch.Tensor, first: int, model: Any) -> torch.Tensor:
    kept = torch.arange(first - 1, ids_BT.shape[1] - 1, device=ids_BT.device)
    return logits_after(model, ids_BT, kept)
