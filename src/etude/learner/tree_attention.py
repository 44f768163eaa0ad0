"""Attention over token trees: block by block, or on CUDA by a call of a flash kernel for each level.

CUDA's kernels take ranges of tokens of any length, and need no compilation. A query's results from several
blocks or levels are weighted by the sums of exponentials of its scores there (Milakov and Gimelshein, 2018).
In the backward pass, the kernels need only the final result and sum, and the gradients add up.
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
from etude.learner.tree import Block, Level, Queries, TreeLayout, token_tree
from etude.models.architecture import text_config

_LOG = logging.getLogger("etude.learner")
_NAME = "etude_tree"
_WIDEST = 256
"""The widest head of CUDA's flash kernels."""
_TOLERANCE = 0.03
"""Relative difference that rounding to half precision explains."""

_Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries, keys and values of a block, and the mask to add to their scores."""
_Attended: TypeAlias = tuple[Tensor, Tensor]
"""Values, and the log-sum-exp of scores. On CUDA they are [N, H, D] and [H, N]."""
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

    def uses_levels(self, x: Tensor, size: int) -> bool:
        """Return whether flash kernels compute it, for heads of this width with the device and precision of
        `x`. Their queries are always all tokens."""
        plain = self.scores.softcap is None and self.scores.window is None
        return plain and takes_flash(x, size)


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
        out, sums = attend_levels(query, key, value, spec.tree.levels, spec.scores.scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        levels, scale = ctx.spec.tree.levels, ctx.spec.scores.scale
        return *gradients_of_levels(grad, (query, key, value), (out, sums), levels, scale), None


class _BlockAttention(torch.autograd.Function):
    """Attention of queries [G, R, Q, D] to keys [G, N, D] and values [G, N, W].

    On a CPU, half precision is computed in float32, because the flash kernel for float32 takes half the time.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the values, weighted by how much each query attends to their keys."""
        out, sums = _attend_blocks(_widen(query, key, value), spec)
        out = out.to(query.dtype)
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
