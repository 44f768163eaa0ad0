"""The plain way to run sequences through a model, right-padded micro-batches; and helpers for every way.

It is correct for any causal language model, because tokens to the right of a token cannot affect it. It is
the baseline that every faster way must equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import Any, TypeAlias

import numpy as np
import torch

from etude.core.call import Sampling
from etude.core.errors import EngineError, TrainingError
from etude.core.sample import Sample, Turn
from etude.learner.head import Head, last_hidden
from etude.learner.objective import MicroBatch, Pass, States, Unit
from etude.learner.tree import Places
from etude.models.architecture import logits_after
from etude.models.distribution import Adjuster, Adjustment
from etude.models.grammar import Grammars
from etude.models.policy import Policy

_LOG = logging.getLogger("etude.learner")

Shares: TypeAlias = tuple[float, float]
"""`unit_share` and `token_share` of a step, as in `MicroBatch`."""


class TrainedSample:
    """The trained part of a sample in a step."""

    def __init__(self, sample: Sample, factor: float, number: int) -> None:
        self.sample = sample
        self.factor = factor
        """The factor of its weights."""
        self.number = number
        """Its index among the samples of all units."""
        self.positions = np.flatnonzero(np.asarray(sample.loss_weights[1:])) + 1
        """Positions of the tokens with a weight; never 0, because no token precedes the first."""
        start, last = self.positions[[0, -1]] if len(self.positions) else (0, -1)
        self._reach = slice(start, last + 1)

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens that the model has to read: all before the last choice."""
        return self.sample.ids[: max(self._reach.stop - 1, 0)]

    def values(self, field: Sequence[float]) -> np.ndarray:
        """Return a field's values at the trained tokens."""
        return np.asarray(field[self._reach], dtype=np.float64)[self.positions - self._reach.start]


TrainedUnit: TypeAlias = Sequence[TrainedSample]


def trained_units(
    units: Sequence[Unit], factors: Sequence[Sequence[float]] | None = None
) -> list[TrainedUnit]:
    """Return the samples of each unit; `factors` come from `Objective.normalised`, or are 1."""
    numbers, given = count(), repeat(repeat(1.0)) if factors is None else factors
    return [[*map(TrainedSample, unit, own, numbers)] for unit, own in zip(units, given, strict=False)]


def padded_passes(
    units: Sequence[TrainedUnit], shares: Shares, token_budget: int, policy: Policy, plain_head: bool
) -> Iterator[Pass]:
    """Cut an optimiser step into micro-batches of at most `token_budget` padded tokens.

    Units of similar length go together. A unit is never split, and one above the budget goes alone. `shares`
    belong to the whole step. Without a plain head, the model itself makes the logits after all tokens that
    any row of a micro-batch trains on.
    """
    rows: list[TrainedSample] = []
    for index in sort_by_length(units):
        longest = max(len(each.sample.ids) for each in units[index])
        if rows and (len(rows) + len(units[index])) * longest > token_budget:
            yield _make_padded_pass(rows, shares, policy, plain_head)
            rows = []
        rows += units[index]
    if rows:
        yield _make_padded_pass(rows, shares, policy, plain_head)


def _make_padded_pass(
    rows: Sequence[TrainedSample], shares: Shares, policy: Policy, plain_head: bool
) -> Pass:
    width = max(len(each.sample.ids) for each in rows)
    device = policy.device
    padded = [[*each.sample.ids, *[0] * (width - len(each.sample.ids))] for each in rows]
    ids_BT = torch.tensor(padded, device=device)

    def states(needed: Places) -> States:
        def run(model: Any) -> tuple[Head, torch.Tensor]:
            if plain_head:
                needed_Q = torch.from_numpy(needed).to(device)
                return Head.of(model), last_hidden(model, ids_BT).flatten(0, 1).index_select(0, needed_Q)
            columns, column = np.unique(needed % width, return_inverse=True)
            logits_BKV = logits_after(model, ids_BT, torch.from_numpy(columns).to(device))
            place_Q = torch.from_numpy(needed // width * len(columns) + column).to(device)
            return Head(lambda logits: logits), logits_BKV.flatten(0, 1).index_select(0, place_Q)

        return run

    paths = [np.arange(len(each.sample.ids)) + row * width for row, each in enumerate(rows)]
    return make_pass(rows, paths, shares, policy, states)


def sort_by_length(units: Sequence[TrainedUnit]) -> list[int]:
    """Return the indices of units, the shortest first."""
    return sorted(range(len(units)), key=lambda index: max(len(each.sample.ids) for each in units[index]))


@dataclass(frozen=True, slots=True)
class UnitSequence:
    """The units of a step in a row, in which units with many common tokens are neighbours."""

    order: tuple[int, ...]
    """Indices of the units."""
    alone: tuple[int, ...]
    """Tokens that each unit costs by itself, in that order."""
    after: tuple[int, ...]
    """Tokens that each unit costs if the one before it is computed with it."""

    def part(self, rank: int, ranks: int) -> list[int]:
        """Return the indices of the units that a process computes, in rising order."""
        start, stop = balanced_runs(self.alone, self.after, ranks)[rank]
        return sorted(self.order[start:stop])


def cheapest_runs(alone: Sequence[int], after: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut a row into runs that cost least in total; return `(start, stop)` of each.

    Costs are as for `balanced_runs`. Each run costs at most `most`, or has one unit. Of equal cuts, take one
    with the fewest runs.
    """
    best, starts = [(0, 0)], list[int]()
    for stop in range(1, len(alone) + 1):
        start, cost = stop - 1, alone[stop - 1]
        options = [(best[start][0] + cost, best[start][1] + 1, start)]
        while start:
            cost += alone[start - 1] + after[start] - alone[start]
            start -= 1
            if cost > most:
                break
            options.append((best[start][0] + cost, best[start][1] + 1, start))
        total, count, start = min(options)
        best.append((total, count))
        starts.append(start)
    runs, stop = list[tuple[int, int]](), len(alone)
    while stop:
        runs.insert(0, (starts[stop - 1], stop))
        stop = starts[stop - 1]
    return runs


def balanced_runs(alone: Sequence[int], after: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a row into `count` runs that minimise the highest cost; return `(start, stop)` of each.

    A run costs `alone` of its first unit and `after`, which is no more, of all others. With too few units,
    the last runs are empty.
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
    """Return the fewest runs that cost at most `most` each."""
    parts: list[tuple[int, int]] = []
    start, cost = 0, 0
    for index in range(len(alone)):
        cost = cost + after[index] if index > start else alone[index]
        if cost > most and index > start:
            parts.append((start, index))
            start, cost = index, alone[index]
    return parts + ([(start, len(alone))] if alone else [])


def padded_row(units: Sequence[TrainedUnit]) -> UnitSequence:
    """Return a step's units by length, without shared tokens. Padding to similar lengths costs little."""
    order = sort_by_length(units)
    costs = tuple(sum(len(each.sample.ids) for each in units[index]) for index in order)
    return UnitSequence(tuple(order), costs, costs)


def make_pass(
    samples: Sequence[TrainedSample],
    paths: Sequence[Places],
    shares: Shares,
    policy: Policy,
    states: Callable[[Places], States],
) -> Pass:
    """Make a pass of the samples' choices; equal tokens in one place, drawn the same way, are one choice.

    `paths` are the places of the samples' tokens. `states` returns the states after tokens in given places.
    """
    device, lengths = policy.device, np.array([len(sample.positions) for sample in samples])
    is_choice_BT = np.arange(lengths.max()) < lengths[:, None]

    def column(field: Callable[[Sample], Sequence[float]]) -> np.ndarray:
        return np.concatenate([sample.values(field(sample.sample)) for sample in samples])

    def tensor(field: Callable[[Sample], Sequence[float]]) -> torch.Tensor:
        filled = np.zeros(is_choice_BT.shape, dtype=np.float32)
        filled[is_choice_BT] = column(field)
        return torch.from_numpy(filled).to(device)

    along = zip(paths, samples, strict=True)
    places = np.concatenate([path[sample.positions - 1] for path, sample in along])
    targets = column(lambda sample: sample.ids).astype(np.int64)
    kinds, shapes = _find_distributions(samples, policy.codec.grammars)
    needed, after = np.unique(places, return_inverse=True)
    names = (after * (targets.max(initial=0) + 1) + targets) * (kinds.max(initial=0) + 1) + kinds
    _, first, choice = np.unique(names, return_index=True, return_inverse=True)
    choices = np.full(is_choice_BT.shape, len(first))
    choices[is_choice_BT] = choice
    weights_BT = tensor(lambda sample: sample.loss_weights)
    micro = MicroBatch(
        weights_BT=weights_BT * weights_BT.new_tensor([each.factor for each in samples])[:, None],
        advantages_BT=tensor(lambda sample: sample.gains),
        # 0 where no logprob is known, as in imitation.
        sampled_BT=tensor(lambda sample: sample.logprobs or (0.0,) * len(sample.ids)),
        unit_share=shares[0],
        token_share=shares[1],
    )
    return Pass(
        micro=micro,
        rows=tuple(each.number for each in samples),
        states=states(needed),
        after_E=torch.from_numpy(after[first]).to(device),
        targets_E=torch.from_numpy(targets[first]).to(device),
        shapes_E=[shapes[index] for index in first],
        choices_BT=torch.from_numpy(choices).to(device),
    )


def _find_distributions(
    samples: Sequence[TrainedSample], grammars: Grammars
) -> tuple[np.ndarray, list[Adjustment | None]]:
    """Return how all trained tokens were drawn, as numbers, and the shapes of their distributions.

    Tokens with the same number after the same tokens have one shape. A shape is None for the model's own
    distribution. Raises TrainingError for a constraint that cannot be kept.
    """
    numbers: dict[tuple[Sampling, int], int] = {}
    kinds, shapes = list[np.ndarray](), list[Adjustment | None]()
    for trained in samples:
        length = len(trained.sample.ids)
        own_kinds, own_shapes = [0] * length, list[Adjustment | None]([None] * length)
        for turn in trained.sample.turns:
            if turn.start == turn.stop or not Adjuster.is_needed(turn.sampling):
                continue
            span, kind = slice(turn.start, turn.stop), (turn.sampling, turn.start)
            own_kinds[span] = [numbers.setdefault(kind, len(numbers) + 1)] * (turn.stop - turn.start)
            own_shapes[span] = _shapes(trained.sample, turn, grammars)
        kinds.append(trained.values(own_kinds))
        shapes += [own_shapes[at] for at in trained.positions]
    return np.concatenate(kinds).astype(np.int64), shapes


def _shapes(sample: Sample, turn: Turn, grammars: Grammars) -> list[Adjustment]:
    prompt, answer = sample.ids[: turn.start], sample.ids[turn.start : turn.stop]
    sampling = turn.sampling
    try:
        shapes = grammars.replay(sampling, prompt, answer)
        if shapes is None:
            _LOG.warning(
                "an answer of episode %s is not of the form that it was sampled in (%s), as the learner "
                "reads it: it is trained on without the form",
                sample.episode or "?",
                sampling.constraint and sampling.constraint.kind,
            )
            shapes = grammars.replay(replace(sampling, constraint=None), prompt, answer)
    except EngineError as error:
        raise TrainingError(f"episode {sample.episode or '?'}: {error}") from error
    return shapes or []
