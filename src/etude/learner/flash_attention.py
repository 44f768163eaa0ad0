"""Attention over token trees on CUDA: one call of a flash kernel for each level of a tree.

The kernels take ranges of tokens of any length, and need no compilation. A query's results from several
levels are weighted by the sums of exponentials of its scores there (Milakov and Gimelshein, 2018). In the
backward pass, the kernel needs only the final result and sum, and the levels' gradients add up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from etude.core.errors import error_words
from etude.learner.tree import Level, TreeLayout, token_tree

_LOG = logging.getLogger("etude.learner")
_WIDEST = 256
"""The kernels' widest head."""
_TOLERANCE = 0.03
"""Relative difference that rounding to half precision explains."""

Attended: TypeAlias = tuple[Tensor, Tensor]
"""Values [N, H, D], and the log-sum-exp of scores [H, N]."""


def takes_flash(x: Tensor, size: int) -> bool:
    """Return whether the kernels run where `x` is, in its precision, for heads of this width."""
    takes = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= _WIDEST
    return takes and why_wrong(x.device, x.dtype, size) is None


@cache
def why_wrong(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    """Return why the kernels' results or gradients are not those of the definition, in a trial."""
    layout = TreeLayout.of(token_tree([[0, 1, 2, 3], [0, 1, 4], [0, 1, 2, 5], [6]]), device, np.arange(7))
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
) -> Attended:
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
    attended: Attended,
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


def _flash(query: Tensor, key: Tensor, value: Tensor, level: Level, scale: float) -> Attended:
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
