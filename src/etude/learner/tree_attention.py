"""Attention over token trees: block by block, or level by level with CUDA's flash kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from etude.learner import flash_attention
from etude.learner.tree import Block, Queries, TreeLayout
from etude.models.architecture import text_config

_NAME = "etude_tree"

_Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries, keys and values of a block, and the mask to add to their scores."""
_Attended: TypeAlias = tuple[Tensor, Tensor]
_Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Within the block, the model attends by the layout that it receives as `tree=`."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    with attending(text_config(model), _NAME):
        yield


@contextmanager
def attending(config: Any, name: str) -> Iterator[None]:
    """Within the block, the config's model uses the named attention function of `transformers`."""
    usual = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = usual


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    tree: TreeLayout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with queries [1, H, N, D] to keys and values [1, G, N, D], H a multiple of G; give [1, N, H, D].

    Raises ValueError for attention with more than a scale, a window and a softcap.
    """
    if (
        dropout
        or attention_mask is not None
        or any(kwargs.get(n) is not None for n in ("s_aux", "position_bias"))
    ):
        raise ValueError("its attention has sinks, biases, dropout or a mask of its own")
    tree.windows.append(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    last = getattr(module, "layer_idx", None) == text_config(module).num_hidden_layers - 1
    queries = tree.last if last else tree.all
    spec = AttentionSpec(tree, queries, Scores(scale, softcap, tree.binding(sliding_window)))
    if queries is tree.all or spec.uses_levels(query, value.shape[-1]):
        return attend(query[0], key[0], value[0], spec).unsqueeze(0), None
    out_QHD = attend(query[0].index_select(1, queries.places_Q), key[0], value[0], spec)
    out_NHD = query.new_zeros(query.shape[2], *out_QHD.shape[1:])
    return out_NHD.index_copy(0, queries.places_Q, out_QHD).unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores follow from queries and keys, except for which tokens attend to which."""

    scale: float
    softcap: float | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """How some tokens of a tree attend to others."""

    tree: TreeLayout
    queries: Queries
    scores: Scores
    """Its window comes from `TreeLayout.binding`."""
    kept: list[_Attended] | None = None
    """Holds the first forward pass's result for the second pass of gradient checkpointing."""

    def uses_levels(self, x: Tensor, size: int) -> bool:
        """Return whether flash kernels compute it, for heads of this width with the device and precision of
        `x`. Their queries are always all tokens."""
        plain = self.scores.softcap is None and self.scores.window is None
        return plain and flash_attention.takes_flash(x, size)


def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attend with queries [H, Q, D] to keys [G, N, D] and values [G, N, W], H a multiple of G.

    Returns [Q, H, W].
    """
    if query.shape[-1] == value.shape[-1] and spec.uses_levels(query, query.shape[-1]):
        by_token = (each.transpose(0, 1) for each in (query, key, value))
        return _LevelAttention.apply(*by_token, spec)  # type: ignore[no-any-return, no-untyped-call]
    query_GRQD = query.view(len(key), -1, *query.shape[1:])
    out_GRQD = _BlockAttention.apply(query_GRQD, key, value, spec)  # type: ignore[no-untyped-call]
    return out_GRQD.permute(2, 0, 1, 3).flatten(1, 2)  # type: ignore[no-any-return]


class _LevelAttention(torch.autograd.Function):
    """Attention of queries [N, H, D] to keys and values [N, G, D] by flash kernels."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the values, weighted by how much each query attends to their keys."""
        if spec.kept:
            out, sums = spec.kept.pop()
        else:
            levels, scale = spec.tree.levels, spec.scores.scale
            out, sums = flash_attention.attend_levels(query, key, value, levels, scale)
            if spec.kept is not None:
                spec.kept.append((out.detach(), sums))
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        levels, scale = ctx.spec.tree.levels, ctx.spec.scores.scale
        given = query, key, value
        return *flash_attention.gradients_of_levels(grad, given, (out, sums), levels, scale), None


class _BlockAttention(torch.autograd.Function):
    """Attention of queries [G, R, Q, D] to keys [G, N, D] and values [G, N, W].

    A query's results from several blocks are weighted by the sums of exponentials of its scores there
    (Milakov and Gimelshein, 2018). In the backward pass, the blocks' gradients add up. On a CPU, half
    precision is computed in float32, because the flash kernel for float32 takes half the time.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the values, weighted by how much each query attends to their keys."""
        if spec.kept:
            out, sums = spec.kept.pop()
        else:
            out, sums = _attend_blocks(_widen(query, key, value), spec)
            out = out.to(query.dtype)
            if spec.kept is not None:
                spec.kept.append((out.detach(), sums))
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Sum up each block's gradients of its queries, keys and values."""
        *given, out, sums = ctx.saved_tensors
        spec: AttentionSpec = ctx.spec
        query, key, value = _widen(*given)
        grad_out, out = (x.to(query.dtype) for x in (grad_out, out))
        kernel = _kernel(query, value, spec)
        of_query, of_key, of_value = (_empty_beside(x).zero_() for x in (query, key, value))
        for block in (*spec.queries.own, *spec.queries.back):
            mask = spec.tree.mask(spec.queries, block, spec.scores.window, query.dtype)
            rows, keys = block.queries, block.keys
            inputs = query[..., rows, :], key[..., keys, :], value[..., keys, :], mask
            grads = kernel.backward(grad_out[..., rows, :], inputs, out[..., rows, :], sums[..., rows])
            of_query[..., rows, :] += grads[0]
            of_key[..., keys, :] += grads[1]
            of_value[..., keys, :] += grads[2]
        parts = of_query, of_key.sum(dim=1), of_value.sum(dim=1)
        return *(part.to(one.dtype) for part, one in zip(parts, given, strict=True)), None


def _widen(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three as [G, R, N, D], in the precision of the computation."""
    if query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16):
        query, key, value = query.float(), key.float(), value.float()
    key, value = (x.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for x in (key, value))
    return query, key, value


def _attend_blocks(inputs: tuple[Tensor, Tensor, Tensor], spec: AttentionSpec) -> _Attended:
    """Return values for all queries [G, R, Q, W], and the log-sum-exp of their scores [G, R, Q]."""
    query, key, value = inputs
    kernel = _kernel(query, value, spec)
    out = _empty_beside(query[..., :1].expand(*query.shape[:-1], value.shape[-1]))
    sums = _empty_beside(query[..., :1], torch.float32)[..., 0]

    def attend(block: Block) -> _Attended:
        keys, mask = block.keys, spec.tree.mask(spec.queries, block, spec.scores.window, query.dtype)
        return kernel.forward((query[..., block.queries, :], key[..., keys, :], value[..., keys, :], mask))

    for block in spec.queries.own:
        out[..., block.queries, :], sums[..., block.queries] = attend(block)
    for block in spec.queries.back:
        rows = block.queries
        more, sum_of_more = attend(block)
        total = torch.logaddexp(sums[..., rows], sum_of_more)
        out[..., rows, :].mul_((sums[..., rows] - total).exp_().unsqueeze(-1))
        out[..., rows, :].addcmul_(more, (sum_of_more - total).exp_().unsqueeze(-1))
        sums[..., rows] = total
    return out, sums


def _kernel(query: Tensor, value: Tensor, spec: AttentionSpec) -> _Flash | _Plain:
    is_flash = query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    plain = not is_flash or spec.scores.softcap is not None or spec.scores.window is not None
    return _Plain(spec.scores) if plain else _Flash(spec.scores)


@dataclass(frozen=True, slots=True)
class _Flash:
    """The CPU's flash kernel."""

    scores: Scores

    def forward(self, inputs: _Inputs) -> _Attended:
        """Return the weighted values, and the log-sum-exp of their scores."""
        query, key, value, mask = inputs
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, attn_mask=mask, scale=self.scores.scale
        )

    def backward(self, grad: Tensor, inputs: _Inputs, out: Tensor, sums: Tensor) -> _Gradients:
        """Return the gradients of queries, keys and values; `out` and `sums` cover all blocks."""
        query, key, value, mask = inputs
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, query, key, value, out, sums, 0.0, False, attn_mask=mask, scale=self.scores.scale
        )


@dataclass(frozen=True, slots=True)
class _Plain:
    """Attention by its definition, also with a softcap, and for queries that see nothing of a block."""

    scores: Scores

    def forward(self, inputs: _Inputs) -> _Attended:
        scores, _ = self._scores(inputs)
        sums = scores.logsumexp(dim=-1)
        return _exp(scores, sums).to(inputs[2].dtype) @ inputs[2], sums

    def backward(self, grad: Tensor, inputs: _Inputs, out: Tensor, sums: Tensor) -> _Gradients:
        query, key, value, _ = inputs
        scores, slope = self._scores(inputs)
        weights = _exp(scores, sums).to(value.dtype)
        of_weights = grad @ value.transpose(-1, -2) - (grad * out).sum(dim=-1, keepdim=True)
        of_scores = weights * of_weights * slope * self.scores.scale
        return of_scores @ key, of_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad

    def _scores(self, inputs: _Inputs) -> tuple[Tensor, Tensor | float]:
        """Return the scores before the exponential, and the slope of the softcap there."""
        query, key, _, mask = inputs
        scores, softcap = (query @ key.transpose(-1, -2) * self.scores.scale).float(), self.scores.softcap
        slope: Tensor | float = 1.0
        if softcap is not None:
            capped = torch.tanh(scores / softcap)
            scores, slope = softcap * capped, (1 - capped.square()).to(query.dtype)
        return scores if mask is None else scores + mask, slope


def _exp(scores: Tensor, sums: Tensor) -> Tensor:
    """Return the weights; zeros for a query that sees nothing, whose `sums` is minus infinity."""
    return torch.exp(scores - sums.clamp(min=torch.finfo(sums.dtype).min).unsqueeze(-1))


def _empty_beside(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor [G, R, N, D] with the projections' layout in memory, [N, G, R, D]."""
    groups, repeats, size, width = like.shape
    return like.new_empty(size, groups, repeats, width, dtype=dtype).permute(1, 2, 0, 3)
