"""Passes of sequences through a model: as token trees, with every token once, or right-padded.

Padding is correct for any causal language model, because tokens to the right of a token cannot affect it. It
is the baseline that trees must equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat
from operator import sub
from typing import Any, TypeAlias

import numpy as np
import torch

from etude.core.call import Sampling
from etude.core.errors import EngineError, TrainingError
from etude.core.sample import Sample, Unit
from etude.learner.head import Head, head_logits, last_hidden
from etude.learner.objective import MicroBatch, Pass, States
from etude.learner.tree import Places, TokenTree, TreeLayout, token_tree
from etude.learner.tree_attention import tree_attention
from etude.learner.tree_llama import is_lean, lean_hidden
from etude.models.architecture import (
    FULL,
    SLIDING,
    layer_kinds,
    logit_error,
    logits_after,
    text_config,
    without_lora,
)
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
    """Return the samples of each unit; `factors` come from `Objective.weight_factors`, or are 1."""
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
                return Head.find(model), last_hidden(model, ids_BT).flatten(0, 1).index_select(0, needed_Q)
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
            prompt, answer = trained.sample.ids[: turn.start], trained.sample.ids[span]
            episode = trained.sample.episode or "?"
            try:
                found = grammars.replay(turn.sampling, prompt, answer)
                if found is None:
                    _LOG.warning(
                        "an answer of episode %s is not of the form that it was sampled in (%s), as the "
                        "learner reads it: it is trained on without the form",
                        episode,
                        turn.sampling.constraint and turn.sampling.constraint.kind,
                    )
                    found = grammars.replay(replace(turn.sampling, constraint=None), prompt, answer)
            except EngineError as error:
                raise TrainingError(f"episode {episode}: {error}") from error
            own_shapes[span] = found or []
        kinds.append(trained.values(own_kinds))
        shapes += [own_shapes[at] for at in trained.positions]
    return np.concatenate(kinds).astype(np.int64), shapes


class PackedStep:
    """The units of one optimiser step as a token tree."""

    def __init__(self, units: Sequence[TrainedUnit]) -> None:
        self._units = units
        self._tree = token_tree([sample.ids for unit in units for sample in unit])
        paths = iter(self._tree.paths)
        self._paths = [[next(paths) for _ in unit] for unit in units]
        """The paths of each unit's samples in the tree."""
        self.size = len(self._tree)
        """Number of tokens that go through the model."""
        tokens = sum(len(each.sample.ids) for unit in units for each in unit)
        self.pays = 0 < self.size <= 0.8 * tokens
        """Whether samples share enough tokens for a tree to be faster than padding, on a CPU."""

    def passes(self, shares: Shares, token_budget: int, policy: Policy) -> Iterator[Pass]:
        """Yield passes of at most `token_budget` tokens of the tree; arguments are as for `padded_passes`."""
        row, runs = self.row(), [(0, len(self._units))] if self._units else []
        if self.size > token_budget:
            runs = cheapest_runs(row.alone, row.after, token_budget)
        for start, stop in runs:
            samples = [sample for index in sorted(row.order[start:stop]) for sample in self._units[index]]
            tree = self._tree if len(runs) == 1 else token_tree([sample.ids for sample in samples])
            yield make_pass(samples, tree.paths, shares, policy, partial(_tree_states, tree, policy.device))

    def row(self) -> UnitSequence:
        """Return the units in depth-first order, as passes and processes take them."""
        places = [np.unique(np.concatenate(paths)) for paths in self._paths]
        order = sorted(range(len(places)), key=lambda index: tuple(places[index][-1:]))
        before = [np.empty(0, np.int64), *(places[index] for index in order)]
        alone = [len(places[index]) for index in order]
        pairs = zip((places[index] for index in order), before, strict=False)
        shared = [len(np.intersect1d(own, last, assume_unique=True)) for own, last in pairs]
        return UnitSequence(tuple(order), tuple(alone), tuple(map(sub, alone, shared)))


def _tree_states(tree: TokenTree, device: torch.device, needed: Places) -> States:
    """Return the states of the tree's tokens at the places `needed`."""
    ids_N, layout = torch.from_numpy(tree.ids).to(device), TreeLayout.build(tree, device, needed)
    return lambda model: (Head.find(model), tree_hidden(model, ids_N, layout))


def tree_hidden(model: Any, ids_N: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
    """Return the last hidden states [Q, D] of the tokens `layout.last`; a token's position is its depth."""
    plain = without_lora(model)
    if is_lean(plain):
        return lean_hidden(plain, ids_N, layout)
    with tree_attention(model):
        output = plain.base_model(
            input_ids=ids_N[None], position_ids=layout.depths_N[None], use_cache=False, tree=layout
        )
    hidden_QD: torch.Tensor = output.last_hidden_state[0].index_select(0, layout.last.places_Q)
    return hidden_QD


def tree_refusal(model: Any) -> str | None:
    """Return the reason why a model does not support token trees, as a sentence, or None if it does.

    A trial run tests its attention, positions and head: a small tree must give the logits of plain forward
    passes.
    """
    kinds = layer_kinds(model)
    if not getattr(without_lora(model), "_supports_attention_backend", False):
        return "this model does not use the attention interface of transformers"
    if not set(kinds) <= {FULL, SLIDING}:
        return "this model has layers that are not plain attention"
    try:
        windows, off = _try(model)
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        return f"this model cannot be run on a token tree ({type(error).__name__}: {error})"
    if len(windows) != len(kinds) or sum(map(bool, windows)) != kinds.count(SLIDING):
        return "not all layers of this model tell their sliding window"
    if off is not None:
        return f"this model's logits on a token tree are off by {off} of the largest"
    return None


@torch.no_grad()
def _try(model: Any) -> tuple[list[int | None], str | None]:
    """Return the layers' windows on a small tree, and how far its logits are off, or None."""
    device, size = next(model.parameters()).device, text_config(model).vocab_size
    draw = np.random.default_rng(0)
    stem, *ends = (draw.integers(size, size=count).tolist() for count in (5, 3, 4, 2))
    sequences = [stem + end for end in ends]
    tree = token_tree(sequences)
    needed = np.flatnonzero(tree.depths >= len(stem) - 1)
    layout = TreeLayout.build(tree, device, needed)
    logits_QV = head_logits(model, tree_hidden(model, torch.from_numpy(tree.ids).to(device), layout))
    plain, logits = [], []
    for sequence, path in zip(sequences, tree.paths, strict=True):
        positions = torch.arange(len(stem) - 1, len(sequence), device=device)
        plain.append(logits_after(model, torch.tensor([sequence], device=device), positions)[0])
        rows = np.searchsorted(needed, path[len(stem) - 1 :])
        logits.append(logits_QV[torch.from_numpy(rows).to(device)])
    dtype = next(model.parameters()).dtype
    return layout.windows, logit_error(torch.cat(logits), torch.cat(plain), dtype)
