"""Token trees through a Hugging Face decoder, and which decoders take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from etude.inference.fused_weights import is_llama
from etude.learner.head import head_logits, off_by
from etude.learner.tree import Kernel, TreeLayout, token_tree
from etude.learner.tree_attention import AttentionSpec, attend, tree_attention
from etude.models.architecture import FULL, SLIDING, layer_kinds, logits_after, text_config, without_lora


def tree_hidden(model: Any, ids_N: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
    """Last hidden states [Q, D] of the tokens of `layout.last`; a token's position is its depth."""
    plain = without_lora(model)
    if layout.kernel == "blocks" and is_lean(plain):
        return lean_hidden(plain, ids_N, layout)
    filled_1N = F.pad(ids_N, (0, len(layout.depths_N) - len(ids_N)))[None]
    with tree_attention(model):
        output = plain.base_model(
            input_ids=filled_1N, position_ids=layout.depths_N[None], use_cache=False, tree=layout
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
    return layout.windows, off_by(model, torch.cat(logits), torch.cat(plain))


def is_lean(model: Any) -> bool:
    """Whether `lean_hidden` knows all that the model does. `model` has no LoRA weights around it."""
    return (
        model.dtype == torch.float32
        and is_llama(model)
        and not any("forward" in vars(layer) or layer._forward_pre_hooks for layer in model.model.layers)
    )


def lean_hidden(model: Any, ids_N: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
    """Last hidden states [Q, E] of the tokens of `layout.last`, up to rounding the model's own."""
    body = model.model
    x_NE = body.embed_tokens(ids_N)
    cos_1ND, sin_1ND = body.rotary_emb(x_NE[None], layout.depths_N[None])
    half = cos_1ND.shape[-1] // 2
    turn_N1C = torch.complex(cos_1ND[0, :, :half], sin_1ND[0, :, :half])[:, None]
    for layer, kind in zip(body.layers, layer_kinds(model), strict=True):
        window = model.config.sliding_window if kind == SLIDING else None
        layout.windows.append(window)
        queries = layout.last if layer is body.layers[-1] else layout.all
        spec = AttentionSpec(layout, queries, layout.binding(window), layer.self_attn.scaling)
        x_NE = _layer(layer, x_NE, turn_N1C, spec)
    return _normed(body.norm, x_NE)


def _layer(layer: Any, x_NE: torch.Tensor, turn_N1C: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The states after a layer [Q, E] of the tokens that attend in it, from those of all before it [N, E]."""
    attention, queries = layer.self_attn, spec.queries
    normed_NE = _normed(layer.input_layernorm, x_NE)
    key = _turned(_heads(attention, "k", normed_NE), turn_N1C)
    value = _heads(attention, "v", normed_NE)
    if len(queries.places_Q) < len(x_NE):
        rows = queries.places_Q
        x_NE, normed_NE, turn_N1C = (x.index_select(0, rows) for x in (x_NE, normed_NE, turn_N1C))
    query = _turned(_heads(attention, "q", normed_NE), turn_N1C)
    mixed = attend(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), spec)
    x_QE = x_NE + attention.o_proj(mixed.flatten(1))
    return x_QE + layer.mlp(_normed(layer.post_attention_layernorm, x_QE))  # type: ignore[no-any-return]


def _heads(attention: Any, name: str, x_NE: torch.Tensor) -> torch.Tensor:
    """Queries, keys or values [N, H, D]."""
    heads = getattr(attention, f"{name}_proj")(x_NE).view(len(x_NE), -1, attention.head_dim)
    norm = getattr(attention, f"{name}_norm", None)
    return heads if norm is None else _normed(norm, heads)


def _turned(heads_NHD: torch.Tensor, turn_N1C: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al., 2021) of queries or keys; what turns together is side by side then."""
    real, imaginary = heads_NHD.unflatten(-1, (2, -1)).unbind(-2)  # type: ignore[no-untyped-call]
    return torch.view_as_real(torch.complex(real, imaginary) * turn_N1C).flatten(-2)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = _Norm.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return normed


class _Norm(torch.autograd.Function):
    """RMSNorm (Zhang and Sennrich, 2019): w · x / sqrt(mean(x²) + ε) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """In the shape of `x`."""
        norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With y = x·s and g the gradient of y: that of x is s·(g - y·mean(g·y))."""
        x, scale, weight = ctx.saved_tensors
        product = grad_out * x
        mean = (product @ weight).unsqueeze(-1).mul_(scale.square()).div_(x.shape[-1])
        of_x = (grad_out * weight).addcmul_(x, mean, value=-1).mul_(scale)
        return of_x, scale.flatten() @ product.flatten(0, -2), None
