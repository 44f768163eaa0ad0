"""Attention over token trees: in chunks, or on CUDA by a call of a flash kernel for each level.

A chunk has some queries and all tokens that one of them sees, so that many chunks are a few products.

CUDA's kernels take ranges of tokens of any length, and need no compilation. A query's results from several
levels are weighted by the sums of exponentials of its scores there (Milakov and Gimelshein, 2018). In the
backward pass, the kernels need only the final result and sum, and the gradients add up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from etude.core.errors import error_words
from etude.learner.tree import Chunks, Level, Queries, TreeLayout, token_tree
from etude.models.architecture import text_config

_LOG = logging.getLogger("etude.learner")
_NAME = "etude_tree"
_WIDEST = 256
"""The widest head of CUDA's flash kernels."""
_TOLERANCE = 0.03
"""Relative difference that rounding to half precision explains."""

_Attended: TypeAlias = tuple[Tensor, Tensor]
"""Values [N, H, D], and the log-sum-exp of scores [H, N]."""


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
    spec = AttentionSpec(tree, queries, scale, softcap, tree.binding(sliding_window))
    query_NHD, key_NGD, value_NGW = (each[0].transpose(0, 1) for each in (query, key, value))
    if queries is tree.all or spec.uses_levels(query, value.shape[-1]):
        return attend(query_NHD, key_NGD, value_NGW, spec).unsqueeze(0), None
    out_QHW = attend(query_NHD.index_select(0, queries.places_Q), key_NGD, value_NGW, spec)
    out_NHW = query.new_zeros(len(query_NHD), *out_QHW.shape[1:])
    return out_NHW.index_copy(0, queries.places_Q, out_QHW).unsqueeze(0), None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """How some tokens of a tree attend to others."""

    tree: TreeLayout
    queries: Queries
    scale: float
    softcap: float | None = None
    window: int | None = None
    """From `TreeLayout.binding`."""

    def uses_levels(self, x: Tensor, size: int) -> bool:
        """Return whether flash kernels compute it, for heads of this width with the device and precision of
        `x`. Their queries are always all tokens."""
        plain = self.softcap is None and self.window is None
        return plain and takes_flash(x, size)


def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attend with queries [Q, H, D] to keys [N, G, D] and values [N, G, W], H a multiple of G.

    Returns [Q, H, W] in the precision of the values.
    """
    by_levels = query.shape[-1] == value.shape[-1] and spec.uses_levels(query, query.shape[-1])
    attention = _LevelAttention if by_levels else _ChunkAttention
    return attention.apply(query, key, value, spec)  # type: ignore[no-any-return, no-untyped-call]


class _LevelAttention(torch.autograd.Function):
    """Attention of queries [N, H, D] to keys and values [N, G, D] by flash kernels."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the values, weighted by how much each query attends to their keys."""
        out, sums = attend_levels(query, key, value, spec.tree.levels, spec.scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        levels, scale = ctx.spec.tree.levels, ctx.spec.scale
        return *gradients_of_levels(grad, (query, key, value), (out, sums), levels, scale), None


class _ChunkAttention(torch.autograd.Function):
    """Attention of queries [Q, H, D] to keys [N, G, D] and values [N, G, W], by its definition.

    On a CPU, half precision is computed in float32, because it is as fast for such small products.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the values, weighted by how much each query attends to their keys."""
        ctx.save_for_backward(query, key, value)
        ctx.spec = spec
        out_QHW = value.new_empty(*query.shape[:2], value.shape[-1])
        given = _widen(query, key, value)
        for chunks in spec.queries.chunks:
            query_BMD, key_BKD, value_BKW = _take(chunks, *given)
            weights_BMK, _ = _weigh(query_BMD, key_BKD, chunks, spec)
            _put(out_QHW, chunks, weights_BMK @ value_BKW)
        return out_QHW

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sum up the chunks' gradients of their keys and values; each query is in one chunk."""
        spec: AttentionSpec = ctx.spec
        saved = ctx.saved_tensors
        given = _widen(*saved)
        of_query, of_key, of_value = (each.new_zeros(each.shape) for each in given)
        grad = grad.to(of_value.dtype)
        for chunks in spec.queries.chunks:
            query_BMD, key_BKD, value_BKW = _take(chunks, *given)
            grad_BMW = _fold(grad, chunks, of_key.shape[1])
            weights_BMK, slope = _weigh(query_BMD, key_BKD, chunks, spec)
            of_weights = grad_BMW @ value_BKW.transpose(1, 2)
            of_scores = torch._softmax_backward_data(of_weights, weights_BMK, -1, weights_BMK.dtype)
            of_scores = of_scores.mul_(slope * spec.scale)
            _put(of_query, chunks, of_scores @ key_BKD)
            chunks.add_keys(of_key, of_scores.transpose(1, 2) @ query_BMD)
            chunks.add_keys(of_value, weights_BMK.transpose(1, 2) @ grad_BMW)
        grads = zip((of_query, of_key, of_value), saved, strict=True)
        return *(found.to(one.dtype) for found, one in grads), None


def _widen(*given: Tensor) -> list[Tensor]:
    """Return queries, keys and values in the precision of the computation."""
    return [each if each.is_cuda else each.float() for each in given]


def _take(chunks: Chunks, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chunks' queries [C * G, Q * R, D], keys [C * G, K, D] and values [C * G, K, W]."""
    return _fold(query, chunks, key.shape[1]), chunks.take_keys(key), chunks.take_keys(value)


def _fold(x_QHD: Tensor, chunks: Chunks, groups: int) -> Tensor:
    """Return the part of chunks [C * G, Q * R, D], of a tensor that has all queries."""
    x_CQGRD = x_QHD[chunks.queries].view(*chunks.query_CQ.shape, groups, -1, x_QHD.shape[-1])
    return x_CQGRD.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _put(total_QHD: Tensor, chunks: Chunks, x_BMD: Tensor) -> None:
    """Write the part of chunks [C * G, Q * R, D] to a tensor that has all queries."""
    count, size = chunks.query_CQ.shape
    x_CQGRD = x_BMD.view(count, len(x_BMD) // count, size, -1, x_BMD.shape[-1]).transpose(1, 2)
    total_QHD[chunks.queries].view(x_CQGRD.shape).copy_(x_CQGRD)


def _weigh(
    query_BMD: Tensor, key_BKD: Tensor, chunks: Chunks, spec: AttentionSpec
) -> tuple[Tensor, Tensor | float]:
    """Return the weights [B, M, K] of keys, and the slope of the softcap at their scores."""
    scores = (query_BMD @ key_BKD.transpose(1, 2)).float().mul_(spec.scale)
    slope: Tensor | float = 1.0
    if (softcap := spec.softcap) is not None:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, (1 - capped.square()).to(query_BMD.dtype)
    mask_C1Q1K = spec.tree.mask(chunks, spec.window)
    count, _, size, _, width = mask_C1Q1K.shape
    scores.view(count, -1, size, scores.shape[1] // size, width).add_(mask_C1Q1K)
    return scores.softmax(dim=-1).to(query_BMD.dtype), slope


def takes_flash(x: Tensor, size: int) -> bool:
    """Return whether the kernels run where `x` is, in its precision, for heads of this width."""
    takes = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= _WIDEST
    return takes and why_wrong(x.device, x.dtype, size) is None


@cache
def why_wrong(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    """Return why the kernels' results or gradients differ from the definition's, in a trial."""
    layout = TreeLayout.build(token_tree([[0, 1, 2, 3], [0, 1, 4], [0, 1, 2, 5], [6]]), device, np.arange(7))
    scale, draw = size**-0.5, torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(7, heads, size, generator=draw).to(device, dtype) for heads in (4, 2, 2, 4)
    )
    given = query, key, value
    wide = [each.float().requires_grad_() for each in given]
    places = torch.arange(7, device=device)
    hidden = ~layout.attends(places[:, None], places, None)
    try:
        out, sums = attend_levels(query, key, value, layout.levels, scale)
        found = out, *gradients_of_levels(grad, given, (out, sums), layout.levels, scale)
        with torch.enable_grad():
            keys, values = (each.repeat_interleave(2, 1) for each in wide[1:])
            scores = torch.einsum("qhd,khd->hqk", wide[0], keys).mul(scale).masked_fill(hidden, -torch.inf)
            plain = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            wanted = plain.detach(), *torch.autograd.grad((plain * grad).sum(), wide)
        pairs = zip(found, wanted, strict=True)
        off = max(float((one - other).norm() / other.norm()) for one, other in pairs)
        reason = None if off < _TOLERANCE else f"its results are off by {off:.2g}"
    except Exception as error:  # noqa: BLE001  the kernels of another release may fail in any way
        reason = error_words(error)
    if reason is not None:
        _LOG.warning("training takes longer, without flash attention on token trees: %s", reason)
    return reason


def attend_levels(
    query: Tensor, key: Tensor, value: Tensor, levels: Sequence[Level], scale: float
) -> _Attended:
    """Return the values for queries [N, H, D] with keys and values [N, G, D], and the sums."""
    mixed, sums = _flash(query, key, value, levels[0], scale)
    if len(levels) == 1:
        return mixed, sums
    out = mixed.float()
    for level in levels[1:]:
        assert level.queries_Q is not None
        rows = level.queries_Q
        more, sums_of_more = _flash(*_parts(level, query, key, value), level, scale)
        before = sums.index_select(1, rows)
        total = torch.logaddexp(before, sums_of_more)
        sums.index_copy_(1, rows, total)
        shares = ((each - total).exp_().t().unsqueeze(-1) for each in (before, sums_of_more))
        out.index_copy_(0, rows, out.index_select(0, rows) * next(shares) + more * next(shares))
    return out.to(query.dtype), sums


def gradients_of_levels(
    grad: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    attended: _Attended,
    levels: Sequence[Level],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, keys and values `given`."""
    out, sums = attended
    found = _flash_back(grad, *given, out, sums, levels[0], scale)
    if len(levels) == 1:
        return found
    totals = [each.float() for each in found]
    for level in levels[1:]:
        rows, keys = level.queries_Q, level.keys_K
        assert rows is not None and keys is not None
        parts = _parts(level, *given)
        of_rows = grad.index_select(0, rows), out.index_select(0, rows), sums.index_select(1, rows)
        more = _flash_back(of_rows[0], *parts, of_rows[1], of_rows[2].contiguous(), level, scale)
        for total, places, new in zip(totals, (rows, keys, keys), more, strict=True):
            total.index_copy_(0, places, total.index_select(0, places) + new)
    of_query, of_key, of_value = (total.to(query.dtype) for total, query in zip(totals, given, strict=True))
    return of_query, of_key, of_value


def _parts(level: Level, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = level.queries_Q, level.keys_K
    assert rows is not None and keys is not None
    return query.index_select(0, rows), key.index_select(0, keys), value.index_select(0, keys)


def _flash(query: Tensor, key: Tensor, value: Tensor, level: Level, scale: float) -> _Attended:
    causal = level.queries_Q is None
    ends = level.query_ends, level.key_ends
    found: Any = torch.ops.aten._flash_attention_forward(
        query, key, value, *ends, *level.longest, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


def _flash_back(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    level: Level,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # Without dropout, the kernel reads no random state.
    random = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    causal = level.queries_Q is None
    ends = level.query_ends, level.key_ends
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        grad, query, key, value, out, sums, *ends, *level.longest, 0.0, causal, *random, scale=scale
    )
