"""The fast way to run sequences through a model: as token trees, every token once; and which take them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import sub
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from etude.core.sample import Sample
from etude.learner.head import Head, Shapes, has_plain_head, head_logits, selective_logprobs
from etude.learner.lean import is_lean, lean_hidden
from etude.learner.objective import Pass, Unit
from etude.learner.padding import Numbered, Row, Shares, drawn, micro_batch, numbered, padded_passes
from etude.learner.tree import Kernel, Places, TokenTree, TreeLayout, token_tree
from etude.learner.tree_attention import tree_attention
from etude.models.architecture import (
    FULL,
    SLIDING,
    layer_kinds,
    logits_after,
    off_by,
    text_config,
    without_lora,
)
from etude.models.policy import Policy
from etude.models.speech import Speech


class _Trained:
    """A sample, as far as it is trained on."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.positions = np.flatnonzero(np.asarray(sample.loss_weights[1:])) + 1
        """Of the tokens with a weight; the first of all is not chosen after anything."""
        start, last = self.positions[[0, -1]] if len(self.positions) else (0, -1)
        self._reach = slice(start, last + 1)

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens that the model has to read: none after the last choice, nor that itself."""
        return self.sample.ids[: max(self._reach.stop - 1, 0)]

    def values(self, field: Sequence[float]) -> np.ndarray:
        """A field's values of the trained tokens."""
        return np.asarray(field[self._reach], dtype=np.float64)[self.positions - self._reach.start]


class PackedStep:
    """The units of one optimiser step as a token tree."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [[_Trained(sample) for sample in unit] for unit in units]
        self._tree = token_tree([sample.ids for unit in self._units for sample in unit])
        paths = iter(self._tree.paths)
        self._paths = [[next(paths) for _ in unit] for unit in units]
        """Of the samples of each unit, in the tree."""
        self.size = len(self._tree)
        """Tokens that go through the model."""
        tokens = sum(len(sample.ids) for unit in units for sample in unit)
        self.pays = 0 < self.size <= 0.8 * tokens
        """Whether samples have so much in common that a tree is faster than padding, on a CPU."""

    def passes(
        self,
        units: Sequence[Sequence[Numbered]],
        shares: Shares,
        token_budget: int,
        speech: Speech,
        device: torch.device,
    ) -> Iterator[Pass]:
        """Packs of at most `token_budget` tokens of the tree; the arguments are those of `padded_passes`."""
        packed = packs(self._tree, self._paths, token_budget)
        for pack in packed:
            samples = [sample for index in pack for sample in self._units[index]]
            rows = [row for index in pack for row in units[index]]
            tree = self._tree if len(packed) == 1 else token_tree([sample.ids for sample in samples])
            yield _pass(tree, samples, rows, shares, speech, device)

    def row(self) -> Row:
        """The units for dealing, in depth-first order."""
        places = [np.unique(np.concatenate(paths)) for paths in self._paths]
        order = sorted(range(len(places)), key=lambda index: tuple(places[index][-1:]))
        before = [np.empty(0, np.int64), *(places[index] for index in order)]
        alone = [len(places[index]) for index in order]
        pairs = zip((places[index] for index in order), before, strict=False)
        shared = [len(np.intersect1d(own, last, assume_unique=True)) for own, last in pairs]
        return Row(tuple(order), tuple(alone), tuple(map(sub, alone, shared)))


def packs(tree: TokenTree, units: Sequence[Sequence[Places]], token_budget: int) -> list[list[int]]:
    """Indices of `units` by pack; a pack has at most `token_budget` tokens of the tree.

    A unit is given as the paths of its sequences in `tree`. It is never split, and one above the budget
    takes along only units that are all in it. The largest subtrees that fit stay whole; a pack with a part of
    a larger one repeats what comes before it. Each subtree goes where the least room is left (best fit), of
    those packs that already have most of its tokens.
    """
    if units and len(tree) <= token_budget:
        return [list(range(len(units)))]
    packed: list[list[int]] = []
    held: list[np.ndarray] = []
    used: list[int] = []
    for piece, wanted in _pieces(tree, units, token_budget):
        costs = [len(wanted) - int(mask[wanted].sum()) for mask in held]
        fitting = [
            number for number, cost in enumerate(costs) if not cost or used[number] + cost <= token_budget
        ]
        if fitting:
            best = min(fitting, key=lambda number: (costs[number], -used[number]))
        else:
            best = len(packed)
            packed.append([])
            held.append(np.zeros(len(tree), dtype=bool))
            used.append(0)
            costs.append(len(wanted))
        packed[best] += piece
        held[best][wanted] = True
        used[best] += costs[best]
    return [sorted(pack) for pack in packed]


def _pieces(
    tree: TokenTree, units: Sequence[Sequence[Places]], token_budget: int
) -> list[tuple[list[int], Places]]:
    """Units by the largest subtree that fits, and all of their tokens; the largest pieces first."""
    places = [np.unique(np.concatenate(unit)) for unit in units]
    pieces: dict[int, list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        path = max(unit, key=len)
        sizes = tree.ends[path] - path + tree.depths[path]
        fits = sizes <= token_budget
        pieces[int(path[fits.argmax()]) if fits.any() else -1 - index].append(index)
    result: list[tuple[list[int], Places]] = []
    for piece in pieces.values():
        together = np.unique(np.concatenate([places[index] for index in piece]))
        # Preferences may have a second sequence outside the subtree of their first.
        fits_together = len(together) <= token_budget
        result += [(piece, together)] if fits_together else [([index], places[index]) for index in piece]
    return sorted(result, key=lambda sized: (-len(sized[1]), sized[0]))


def _pass(
    tree: TokenTree,
    samples: Sequence[_Trained],
    rows: Sequence[Numbered],
    shares: Shares,
    speech: Speech,
    device: torch.device,
) -> Pass:
    """The samples' choices; those of the same token in the same place, drawn in the same way, are one."""
    lengths = np.array([len(sample.positions) for sample in samples])
    is_choice_BK = np.arange(lengths.max()) < lengths[:, None]

    def column(field: Callable[[Sample], Sequence[float]]) -> np.ndarray:
        return np.concatenate([sample.values(field(sample.sample)) for sample in samples])

    def tensor(field: Callable[[Sample], Sequence[float]]) -> torch.Tensor:
        filled = np.zeros(is_choice_BK.shape, dtype=np.float32)
        filled[is_choice_BK] = column(field)
        return torch.from_numpy(filled).to(device)

    along = zip(tree.paths, samples, strict=True)
    places = np.concatenate([path[sample.positions - 1] for path, sample in along])
    targets = column(lambda sample: sample.ids).astype(np.int64)
    ways = list(zip(samples, drawn([sample.sample for sample in samples], speech.grammars), strict=True))
    kinds = np.concatenate([sample.values(own.kinds) for sample, own in ways]).astype(np.int64)
    shapes = [own.shapes[at] for sample, own in ways for at in sample.positions]
    needed, after = np.unique(places, return_inverse=True)
    names = (after * (targets.max() + 1) + targets) * (kinds.max() + 1) + kinds
    _, first, choice = np.unique(names, return_index=True, return_inverse=True)
    choices = np.full(is_choice_BK.shape, len(first))
    choices[is_choice_BK] = choice
    return _TreePass(
        micro=micro_batch(tensor, rows, shares),
        rows=tuple(number for *_, number in rows),
        ids_N=torch.from_numpy(tree.ids).to(device),
        layout=TreeLayout.of(tree, device, needed),
        after_E=torch.from_numpy(after[first]).to(device),
        targets_E=torch.from_numpy(targets[first]).to(device),
        shapes_E=[shapes[index] for index in first],
        choices_BK=torch.from_numpy(choices).to(device),
    )


@dataclass(frozen=True, slots=True)
class _TreePass(Pass):
    """A tree of N tokens, and the E different choices after them that B rows of up to K are made of."""

    ids_N: torch.Tensor
    layout: TreeLayout
    after_E: torch.Tensor
    """After which of the tree's last hidden states it was chosen."""
    targets_E: torch.Tensor
    """The token that was chosen."""
    shapes_E: Shapes
    """Of the distributions that they were drawn from."""
    choices_BK: torch.Tensor
    """Which of the choices each entry is, and E for padding."""

    def chosen(self, model: Any, *, entropies: bool) -> torch.Tensor:
        """Each choice is computed once, whichever rows have it."""
        hidden_ED = tree_hidden(model, self.ids_N, self.layout).index_select(0, self.after_E)
        head, vocabulary = Head.of(model), text_config(model).vocab_size
        return selective_logprobs(
            head, hidden_ED, self.targets_E, self.shapes_E, vocabulary, entropies=entropies
        )

    def by_rows(self, values_E: torch.Tensor) -> torch.Tensor:
        """With zeros for padding."""
        values_F = F.pad(values_E, (0, 1))
        return values_F.index_select(0, self.choices_BK.flatten()).view(self.choices_BK.shape)


def logprobs_of(policy: Policy, samples: Sequence[Sample], token_budget: int = 16384) -> list[list[float]]:
    """For each sample its tokens' logprobs [T] under a policy, without a gradient.

    They are under the distributions that the tokens were drawn from, as this policy has them; 0 where the
    mask is False.
    """
    units: list[Unit] = [(replace(sample, weights=None, advantages=None),) for sample in samples]
    rows, step = numbered(units, [[1.0]] * len(units)), PackedStep(units)
    with policy.lock, torch.no_grad():
        given = rows, (1.0, 1.0), token_budget, policy.speech, policy.device
        is_tree = step.pays and why_not_trees(policy.model) is None
        passes = step.passes(*given) if is_tree else padded_passes(*given, has_plain_head(policy.model))
        logprobs = [np.zeros(len(sample.ids)) for sample in samples]
        for chunk in passes:
            for number, values in zip(
                chunk.rows, chunk.logprobs(policy.model).numpy(force=True), strict=True
            ):
                (unit,), found = units[number], logprobs[number]
                chosen = _Trained(unit).positions
                found[chosen] = values[: len(chosen)] if is_tree else values[chosen]
    return [values.tolist() for values in logprobs]


def tree_hidden(model: Any, ids_N: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
    """Last hidden states [Q, D] of the tokens of `layout.last`; a token's position is its depth."""
    plain = without_lora(model)
    filled_N = F.pad(ids_N, (0, len(layout.depths_N) - len(ids_N)))
    if is_lean(plain):
        return lean_hidden(plain, filled_N, layout)
    with tree_attention(model):
        output = plain.base_model(
            input_ids=filled_N[None], position_ids=layout.depths_N[None], use_cache=False, tree=layout
        )
    hidden_QD: torch.Tensor = output.last_hidden_state[0].index_select(0, layout.last.places_Q)
    return hidden_QD


def why_not_trees(model: Any, kernel: Kernel | None = None) -> str | None:
    """Why a model does not take token trees, as a sentence of its own; None if it does.

    Whether its attention, its positions and its head are what this module takes them for is seen by
    trying: a small tree must give the logits of plain forward passes. `kernel` is left out for the one that
    the model's device has.
    """
    kinds = layer_kinds(model)
    if not getattr(without_lora(model), "_supports_attention_backend", False):
        return "this model does not use the attention interface of transformers"
    if not set(kinds) <= {FULL, SLIDING}:
        return "this model has layers that are not plain attention"
    try:
        windows, off = _try(model, kernel)
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        return f"this model cannot be run on a token tree ({type(error).__name__}: {error})"
    if len(windows) != len(kinds) or sum(map(bool, windows)) != kinds.count(SLIDING):
        return "not all layers of this model tell their sliding window"
    if off is not None:
        return f"this model's logits on a token tree are off by {off} of the largest"
    return None


@torch.no_grad()
def _try(model: Any, kernel: Kernel | None) -> tuple[list[int | None], str | None]:
    """The layers' windows on a small tree, and by how much its logits are off, if they are."""
    device, size = next(model.parameters()).device, text_config(model).vocab_size
    draw = np.random.default_rng(0)
    stem, *ends = (draw.integers(size, size=count).tolist() for count in (5, 3, 4, 2))
    sequences = [stem + end for end in ends]
    tree = token_tree(sequences)
    needed = np.flatnonzero(tree.depths >= len(stem) - 1)
    layout = TreeLayout.of(tree, device, needed, most=3, kernel=kernel)
    logits_QV = head_logits(model, tree_hidden(model, torch.from_numpy(tree.ids).to(device), layout))
    plain, logits = [], []
    for sequence, path in zip(sequences, tree.paths, strict=True):
        positions = torch.arange(len(stem) - 1, len(sequence), device=device)
        plain.append(logits_after(model, torch.tensor([sequence], device=device), positions)[0])
        rows = np.searchsorted(needed, path[len(stem) - 1 :])
        logits.append(logits_QV[torch.from_numpy(rows).to(device)])
    dtype = next(model.parameters()).dtype
    return layout.windows, off_by(torch.cat(logits), torch.cat(plain), dtype)
