"""The fast way to run sequences through a model: as token trees, every token once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from etude.core.sample import Sample
from etude.learner.head import head_logits, selective_logprobs
from etude.learner.objective import Pass, Unit
from etude.learner.packing import Row, packs
from etude.learner.padding import Shares, micro_batch
from etude.learner.tree import Places, TokenTree, TreeLayout, token_tree
from etude.learner.tree_model import tree_hidden
from etude.models.architecture import text_config

_PAYS = 0.8
"""Share of the tokens that a tree must be left with to be faster than padding, on a CPU."""


class _Row:
    """A sample, as far as it is trained on."""

    def __init__(self, sample: Sample, number: int) -> None:
        self.sample = sample
        self.number = number
        self.trained = np.flatnonzero(np.asarray(sample.loss_weights[1:])) + 1
        """Positions of the tokens with a weight; the first of all is not chosen after anything."""
        self._reach = slice(0, 0) if not len(self.trained) else slice(self.trained[0], self.trained[-1] + 1)

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens that the model has to read: none after the last choice, nor that itself."""
        return self.sample.ids[: max(self._reach.stop - 1, 0)]

    def values(self, field: Sequence[float]) -> np.ndarray:
        """A field's values of the trained tokens."""
        return np.asarray(field[self._reach], dtype=np.float64)[self.trained - self._reach.start]


class PackedStep:
    """The units of one optimiser step as a token tree."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        numbers = count()
        self._rows = [[_Row(sample, next(numbers)) for sample in unit] for unit in units]
        self._tree = token_tree([row.ids for unit in self._rows for row in unit])

    @property
    def size(self) -> int:
        """Tokens that go through the model."""
        return len(self._tree)

    @property
    def pays(self) -> bool:
        """Whether samples have so much in common that a tree is faster than padding."""
        tokens = sum(len(sample.ids) for unit in self._units for sample in unit)
        return 0 < len(self._tree) <= _PAYS * tokens

    def passes(
        self, factors: Sequence[Sequence[float]], shares: Shares, token_budget: int, device: torch.device
    ) -> Iterator[Pass]:
        """Packs of at most `token_budget` tokens of the tree; the arguments are those of `padded_passes`."""
        packed = packs(self._tree, self._unit_paths(), token_budget)
        for pack in packed:
            rows = [row for index in pack for row in self._rows[index]]
            scales = [factor for index in pack for factor in factors[index]]
            tree = self._tree if len(packed) == 1 else token_tree([row.ids for row in rows])
            yield _pass(tree, rows, scales, shares, device)

    def row(self) -> Row:
        """The units for dealing, in depth-first order."""
        places = [np.unique(np.concatenate(paths)) for paths in self._unit_paths()]
        order = sorted(range(len(places)), key=lambda index: tuple(places[index][-1:]))
        before = [np.empty(0, np.int64), *(places[index] for index in order)]
        return Row(
            tuple(order),
            tuple(len(places[index]) for index in order),
            tuple(
                len(places[index]) - len(np.intersect1d(places[index], last, assume_unique=True))
                for index, last in zip(order, before, strict=False)
            ),
        )

    def _unit_paths(self) -> list[list[Places]]:
        paths = iter(self._tree.paths)
        return [[next(paths) for _ in unit] for unit in self._rows]


def _pass(
    tree: TokenTree,
    rows: Sequence[_Row],
    scales: Sequence[float],
    shares: Shares,
    device: torch.device,
) -> Pass:
    width = max(len(row.trained) for row in rows)

    def tensor(field: Callable[[Sample], Sequence[float]]) -> torch.Tensor:
        filled = np.zeros((len(rows), width), dtype=np.float32)
        for number, row in enumerate(rows):
            filled[number, : len(row.trained)] = row.values(field(row.sample))
        return torch.from_numpy(filled).to(device)

    forward = _Forward.of(tree, rows, width, device)
    return Pass(micro_batch(tensor, scales, shares), forward, tuple(row.number for row in rows))


@dataclass(frozen=True, slots=True)
class _Forward:
    """A tree of N tokens, and the E different choices after them that B rows of up to K are made of."""

    ids_N: torch.Tensor
    layout: TreeLayout
    after_E: torch.Tensor
    """After which of the tree's last hidden states it was chosen."""
    targets_E: torch.Tensor
    """The token that was chosen."""
    temperatures_E: torch.Tensor
    choices_BK: torch.Tensor
    """Which of the choices each entry is, and E for padding."""

    @classmethod
    def of(cls, tree: TokenTree, rows: Sequence[_Row], width: int, device: torch.device) -> _Forward:
        """The rows' choices; those of the same token in the same place at the same temperature are one."""
        along = zip(tree.paths, rows, strict=True)
        places = np.concatenate([path[row.trained - 1] for path, row in along])
        targets = np.concatenate([row.values(row.sample.ids) for row in rows]).astype(np.int64)
        temperatures = np.concatenate([row.values(row.sample.temperatures) for row in rows])
        degrees, degree = np.unique(temperatures, return_inverse=True)
        needed, after = np.unique(places, return_inverse=True)
        names = (after * (targets.max() + 1) + targets) * len(degrees) + degree
        _, first, choice = np.unique(names, return_index=True, return_inverse=True)
        choices = np.full((len(rows), width), len(first))
        choices[np.arange(width) < np.array([len(row.trained) for row in rows])[:, None]] = choice
        return cls(
            ids_N=torch.from_numpy(tree.ids).to(device),
            layout=TreeLayout.of(tree, device, needed),
            after_E=torch.from_numpy(after[first]).to(device),
            targets_E=torch.from_numpy(targets[first]).to(device),
            temperatures_E=torch.from_numpy(temperatures[first].astype(np.float32)).to(device),
            choices_BK=torch.from_numpy(choices).to(device),
        )

    def chosen(self, model: Any, *, entropies: bool) -> torch.Tensor:
        """Each choice is computed once, whichever rows have it."""
        hidden_ED = tree_hidden(model, self.ids_N, self.layout).index_select(0, self.after_E)
        head, vocabulary = partial(head_logits, model), text_config(model).vocab_size
        return selective_logprobs(
            head, hidden_ED, self.targets_E, self.temperatures_E, vocabulary, entropies=entropies
        )

    def by_rows(self, values_E: torch.Tensor) -> torch.Tensor:
        """[B, K], with zeros for padding."""
        values_F = F.pad(values_E, (0, 1))
        return values_F.index_select(0, self.choices_BK.flatten()).view(self.choices_BK.shape)
