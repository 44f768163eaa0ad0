"""Token trees through a Hugging Face decoder, and which decoders take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from etude.learner.head import head_logits
from etude.learner.lean import is_lean, lean_hidden
from etude.learner.tree import Kernel, TreeLayout, token_tree
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
