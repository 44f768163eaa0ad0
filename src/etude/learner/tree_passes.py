"""The fast way to run sequences through a model: as token trees, with every token once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import sub
from typing import Any

import numpy as np
import torch

from etude.core.sample import Sample
from etude.learner.head import Head, has_plain_head, head_logits
from etude.learner.objective import Pass, States, Unit
from etude.learner.padding import (
    Shares,
    TrainedUnit,
    UnitSequence,
    cheapest_runs,
    make_pass,
    padded_passes,
    trained_units,
)
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
from etude.models.policy import Policy


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
            yield make_pass(samples, tree.paths, shares, policy, partial(_states, tree, policy.device))

    def row(self) -> UnitSequence:
        """Return the units in depth-first order, as passes and processes take them."""
        places = [np.unique(np.concatenate(paths)) for paths in self._paths]
        order = sorted(range(len(places)), key=lambda index: tuple(places[index][-1:]))
        before = [np.empty(0, np.int64), *(places[index] for index in order)]
        alone = [len(places[index]) for index in order]
        pairs = zip((places[index] for index in order), before, strict=False)
        shared = [len(np.intersect1d(own, last, assume_unique=True)) for own, last in pairs]
        return UnitSequence(tuple(order), tuple(alone), tuple(map(sub, alone, shared)))


def _states(tree: TokenTree, device: torch.device, needed: Places) -> States:
    """Return the states of the tree's tokens at the places `needed`."""
    ids_N, layout = torch.from_numpy(tree.ids).to(device), TreeLayout.of(tree, device, needed)
    return lambda model: (Head.of(model), tree_hidden(model, ids_N, layout))


def sample_logprobs(
    policy: Policy, samples: Sequence[Sample], token_budget: int = 16384
) -> list[list[float]]:
    """Return each sample's token logprobs [T] under a policy, without a gradient.

    They belong to the distributions that the tokens were drawn from, under this policy. They are 0 where the
    mask is False.
    """
    units: list[Unit] = [(replace(sample, weights=None, advantages=None),) for sample in samples]
    rows = trained_units(units)
    step = PackedStep(rows)
    with policy.lock, torch.no_grad():
        given = (1.0, 1.0), token_budget, policy
        is_tree = step.pays and tree_refusal(policy.model) is None
        passes = step.passes(*given) if is_tree else padded_passes(rows, *given, has_plain_head(policy.model))
        logprobs = [np.zeros(len(sample.ids)) for sample in samples]
        for chunk in passes:
            for number, values in zip(chunk.rows, chunk.trained(chunk.logprobs(policy.model)), strict=True):
                logprobs[number][rows[number][0].positions] = values
    return [values.tolist() for values in logprobs]


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
    layout = TreeLayout.of(tree, device, needed, most=3)
    logits_QV = head_logits(model, tree_hidden(model, torch.from_numpy(tree.ids).to(device), layout))
    plain, logits = [], []
    for sequence, path in zip(sequences, tree.paths, strict=True):
        positions = torch.arange(len(stem) - 1, len(sequence), device=device)
        plain.append(logits_after(model, torch.tensor([sequence], device=device), positions)[0])
        rows = np.searchsorted(needed, path[len(stem) - 1 :])
        logits.append(logits_QV[torch.from_numpy(rows).to(device)])
    dtype = next(model.parameters()).dtype
    return layout.windows, logit_error(torch.cat(logits), torch.cat(plain), dtype)
