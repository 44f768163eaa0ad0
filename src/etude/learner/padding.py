"""The plain way to run sequences through a model: right-padded micro-batches; and what every way needs.

Correct for any causal language model, because what stands to the right of a token cannot touch it.
It is the baseline that every faster way must equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from etude.core.call import Sampling
from etude.core.errors import EngineError, TrainingError
from etude.core.sample import Sample, Turn
from etude.learner.head import Head, Shapes, last_hidden, selective_logprobs
from etude.learner.objective import MicroBatch, Pass, Unit
from etude.models.architecture import logits_after, text_config
from etude.models.distribution import Shape, Shaper
from etude.models.grammar import Grammars
from etude.models.speech import Speech

_LOG = logging.getLogger("etude.learner")

Shares: TypeAlias = tuple[float, float]
"""`unit_share` and `token_share` of a step; see `MicroBatch`."""

Numbered: TypeAlias = tuple[Sample, float, int]
"""A sample, the factor of its weights, and its number among the samples of all units."""


def numbered(units: Sequence[Unit], factors: Sequence[Sequence[float]]) -> list[list[Numbered]]:
    """The samples of each unit; `factors` are those of `Objective.normalised`."""
    numbers = count()
    return [[*zip(unit, own, numbers, strict=False)] for unit, own in zip(units, factors, strict=True)]


def padded_passes(
    units: Sequence[Sequence[Numbered]],
    shares: Shares,
    token_budget: int,
    speech: Speech,
    device: torch.device,
    plain_head: bool,
) -> Iterator[Pass]:
    """Cut an optimiser step into micro-batches of at most `token_budget` padded tokens.

    Units of like length go together. A unit is never split, and one above the budget goes alone. `shares` are
    those of the whole step, `speech` is the model's. Unless the model `has_plain_head`, it makes the logits
    after all tokens that any row of a micro-batch trains on.
    """
    rows: list[Numbered] = []
    for index in by_length([[sample for sample, *_ in unit] for unit in units]):
        longest = max(len(sample.ids) for sample, *_ in units[index])
        if rows and (len(rows) + len(units[index])) * longest > token_budget:
            yield _padded(rows, shares, speech, device, plain_head)
            rows = []
        rows += units[index]
    if rows:
        yield _padded(rows, shares, speech, device, plain_head)


def by_length(units: Sequence[Unit]) -> list[int]:
    """Indices of units, the shortest first."""
    return sorted(range(len(units)), key=lambda index: max(len(sample.ids) for sample in units[index]))


@dataclass(frozen=True, slots=True)
class Row:
    """The units of a step in a row, in which those that have much in common are neighbours."""

    order: tuple[int, ...]
    """Indices of the units."""
    alone: tuple[int, ...]
    """Tokens that each costs, in that order."""
    after: tuple[int, ...]
    """Tokens that each costs when the one before it is computed along with it."""

    def part(self, rank: int, ranks: int) -> list[int]:
        """The indices of the units that a process computes, in rising order."""
        start, stop = runs(self.alone, self.after, ranks)[rank]
        return sorted(self.order[start:stop])


def runs(alone: Sequence[int], after: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a row into `count` runs, so that the costliest is as cheap as can be; `(start, stop)` of each.

    A run costs `alone` of its first unit and `after`, which is no more, of all others. There are empty
    runs at the end when there are too few units.
    """
    low, high = max(alone, default=0), sum(alone)
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(alone, after, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    parts = _greedy(alone, after, high)
    return parts + [(len(alone), len(alone))] * (count - len(parts))


def _greedy(alone: Sequence[int], after: Sequence[int], most: int) -> list[tuple[int, int]]:
    """The fewest runs that cost no more than `most`."""
    parts: list[tuple[int, int]] = []
    start, cost = 0, 0
    for index in range(len(alone)):
        cost = cost + after[index] if index > start else alone[index]
        if cost > most and index > start:
            parts.append((start, index))
            start, cost = index, alone[index]
    return parts + ([(start, len(alone))] if alone else [])


def padded_row(units: Sequence[Unit]) -> Row:
    """The units of a step for dealing; nothing is shared. Padding to like lengths costs little."""
    order = by_length(units)
    costs = tuple(sum(len(sample.ids) for sample in units[index]) for index in order)
    return Row(tuple(order), costs, costs)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of a sample's T tokens."""

    kinds: list[int]
    """Tokens that follow the same tokens have the same shape where these numbers are the same."""
    shapes: list[Shape | None]
    """Of the distributions that they were drawn from; None where those are the model's own."""


def drawn(samples: Sequence[Sample], grammars: Grammars) -> list[Drawn]:
    """How the tokens of samples were drawn. Raises TrainingError for a constraint that cannot be kept."""
    numbers: dict[tuple[Sampling, int], int] = {}
    shapes = []
    for sample in samples:
        length = len(sample.ids)
        own = Drawn([0] * length, [None] * length)
        for turn in sample.turns:
            if turn.start == turn.stop or not Shaper.is_needed(turn.sampling):
                continue
            span, kind = slice(turn.start, turn.stop), (turn.sampling, turn.start)
            own.kinds[span] = [numbers.setdefault(kind, len(numbers) + 1)] * (turn.stop - turn.start)
            own.shapes[span] = _shapes(sample, turn, grammars)
        shapes.append(own)
    return shapes


def _shapes(sample: Sample, turn: Turn, grammars: Grammars) -> list[Shape]:
    prompt, answer = sample.ids[: turn.start], sample.ids[turn.start : turn.stop]
    sampling = turn.sampling
    try:
        shapes = grammars.replayed(sampling, prompt, answer)
        if shapes is None:
            _LOG.warning(
                "an answer of episode %s is not of the form that it was sampled in (%s), as the learner "
                "reads that: it is trained on without",
                sample.episode or "?",
                sampling.constraint and sampling.constraint.kind,
            )
            shapes = grammars.replayed(replace(sampling, constraint=None), prompt, answer)
    except EngineError as error:
        raise TrainingError(f"episode {sample.episode or '?'}: {error}") from error
    return shapes or []


def micro_batch(
    tensor: Callable[[Callable[[Sample], Sequence[float]]], torch.Tensor],
    rows: Sequence[Numbered],
    shares: Shares,
) -> MicroBatch:
    """Of rows whose fields `tensor` pads."""
    weights_BT = tensor(lambda sample: sample.loss_weights)
    return MicroBatch(
        weights_BT=weights_BT * weights_BT.new_tensor([factor for _, factor, _ in rows])[:, None],
        advantages_BT=tensor(lambda sample: sample.gains),
        # 0 where nobody knows, as for what is imitated.
        sampled_BT=tensor(lambda sample: sample.logprobs or (0.0,) * len(sample.ids)),
        unit_share=shares[0],
        token_share=shares[1],
    )


def _padded(
    rows: Sequence[Numbered], shares: Shares, speech: Speech, device: torch.device, plain_head: bool
) -> Pass:
    samples = [sample for sample, *_ in rows]
    width = max(len(sample.ids) for sample in samples)

    def tensor(
        field: Callable[[Sample], Sequence[float]], padding: float = 0, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        filled = [[*field(sample), *[padding] * (width - len(sample.ids))] for sample in samples]
        return torch.tensor(filled, dtype=dtype, device=device)

    micro = micro_batch(tensor, rows, shares)
    ids_BT = tensor(lambda sample: sample.ids, dtype=torch.long)
    trained_BK = micro.weights_BT[:, 1:] != 0
    ways = drawn(samples, speech.grammars)
    shapes_E = [ways[row].shapes[at + 1] for row, at in trained_BK.nonzero().tolist()]
    numbers = tuple(number for *_, number in rows)
    return _PaddedPass(micro, numbers, ids_BT, shapes_E, trained_BK, plain_head)


@dataclass(frozen=True, slots=True)
class _PaddedPass(Pass):
    """Rows of tokens, and the E that are trained on."""

    ids_BT: torch.Tensor
    shapes_E: Shapes
    """Of the distributions that they were drawn from."""
    trained_BK: torch.Tensor
    """Which they are, after the first of each row."""
    plain_head: bool

    def chosen(self, model: Any, *, entropies: bool) -> torch.Tensor:
        """The choice of each trained token, given those before it."""
        vocabulary = text_config(model).vocab_size
        positions = self.trained_BK.any(dim=0).nonzero().flatten()
        if self.plain_head:
            head, states_BKD = Head.of(model), last_hidden(model, self.ids_BT)[:, positions]
        else:
            head, states_BKD = Head(lambda logits: logits), logits_after(model, self.ids_BT, positions)
        states_ED = states_BKD[self.trained_BK[:, positions]]
        targets_E = self.ids_BT[:, 1:][self.trained_BK]
        return selective_logprobs(head, states_ED, targets_E, self.shapes_E, vocabulary, entropies=entropies)

    def by_rows(self, values_E: torch.Tensor) -> torch.Tensor:
        """With zeros for tokens that are not trained on."""
        values_BK = values_E.new_zeros(self.trained_BK.shape).masked_scatter(self.trained_BK, values_E)
        return F.pad(values_BK, (1, 0))
