"""Attention over token trees: tile by tile on the CPU, FlexAttention's block masks on CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from etude.learner.flex import Scores, attend
from etude.learner.tree_layout import Run, TreeLayout
from etude.models.architecture import text_config

_NAME = "etude_tree"


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Within the block the model attends by the layout that it is handed as `tree=`."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    config = text_config(model)
    usual = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    tree: TreeLayout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Queries [1, H, N, D] over keys and values [1, G, N, D], H a multiple of G; gives [1, N, H, D].

    Raises ValueError for attention that has more to it than a scale, a window and a softcap, and where
    FlexAttention is wanted and does not run.
    """
    if (
        dropout
        or attention_mask is not None
        or any(kwargs.get(n) is not None for n in ("s_aux", "position_bias"))
    ):
        raise ValueError("its attention has sinks, biases, dropout or a mask of its own")
    tree.windows.append(sliding_window)
    window = tree.binding(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree.kernel != "tiles":
        blocks, scores = tree.block_mask(window), Scores(scale, softcap, window)
        found = attend(query, key, value, blocks, scores, compiled=tree.kernel == "flex")
        return found.transpose(1, 2), None
    groups = key.shape[1]
    query_GRND = query[0].view(groups, -1, *query.shape[2:])
    key_GRND, value_GRND = (x[0].unsqueeze(1).expand(-1, query_GRND.shape[1], -1, -1) for x in (key, value))
    last = getattr(module, "layer_idx", None) == text_config(module).num_hidden_layers - 1
    runs = tree.last_runs if last else tree.runs
    if softcap is None and query.device.type == "cpu":
        out_GRND = _attend_by_tiles(query_GRND, key_GRND, value_GRND, tree, runs, window, scale)
    else:
        out_GRND = _plainly(query_GRND, key_GRND, value_GRND, tree, runs, window, scale, softcap)
    return out_GRND.flatten(0, 1).transpose(0, 1).unsqueeze(0), None


def _plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeLayout,
    runs: Sequence[Run],
    window: int | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention as it is defined, in the shapes of `_TileAttention`."""
    out = torch.zeros_like(query)
    for run in runs:
        keys, values = _taken(key, run), _taken(value, run)
        for tile in run.tiles:
            here = slice(tile.start, tile.stop)
            scores = query[..., here, :] @ keys[..., : tile.width, :].transpose(-1, -2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.float() + tree.mask(run, tile, window, torch.float32)
            out[..., here, :] = torch.softmax(scores, dim=-1).to(value.dtype) @ values[..., : tile.width, :]
    return out


def _attend_by_tiles(*arguments: Any) -> torch.Tensor:
    return _TileAttention.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


class _TileAttention(torch.autograd.Function):
    """The CPU's flash kernel, a call a tile; [G, R, N, D] each, with R rows of queries for one of keys.

    Queries in no tile get zeros. A function of its own because autograd would fill tensors of all keys with
    zeros for every tile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tree: TreeLayout,
        runs: Sequence[Run],
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        """Values by how much each query looks at their keys."""
        out = _zeros_beside(query)
        sums = []
        for run in runs:
            keys, values = _taken(key, run), _taken(value, run)
            for tile in run.tiles:
                found, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query[..., tile.start : tile.stop, :],
                    keys[..., : tile.width, :],
                    values[..., : tile.width, :],
                    attn_mask=tree.mask(run, tile, window, query.dtype),
                    scale=scale,
                )
                out[..., tile.start : tile.stop, :] = found
                sums.append(logsumexp)
        ctx.save_for_backward(query, key, value, out, *sums)
        ctx.tree, ctx.runs, ctx.window, ctx.scale = tree, runs, window, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each run adds to the gradients of the keys that it looked at."""
        query, key, value, out, *sums = ctx.saved_tensors
        of_query, of_key, of_value = (_zeros_beside(x) for x in (query, key, value))
        logsumexps = iter(sums)
        for run in ctx.runs:
            keys, values = _taken(key, run), _taken(value, run)
            of_keys, of_values = (_zeros_beside(x) for x in (keys, values))
            for tile in run.tiles:
                here, there = slice(tile.start, tile.stop), slice(tile.width)
                grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad_out[..., here, :],
                    query[..., here, :],
                    keys[..., there, :],
                    values[..., there, :],
                    out[..., here, :],
                    next(logsumexps),
                    0.0,
                    False,
                    attn_mask=ctx.tree.mask(run, tile, ctx.window, query.dtype),
                    scale=ctx.scale,
                )
                of_query[..., here, :] = grads[0]
                of_keys[..., there, :] += grads[1]
                of_values[..., there, :] += grads[2]
            _add(of_key, of_keys, run)
            _add(of_value, of_values, run)
        return of_query, of_key, of_value, None, None, None, None


def _zeros_beside(like: torch.Tensor) -> torch.Tensor:
    """Zeros [G, R, N, D] that lie in memory as the model's projections do, [N, G, R, D]."""
    groups, repeats, size, width = like.shape
    return like.new_zeros(size, groups, repeats, width).permute(1, 2, 0, 3)


def _taken(values: torch.Tensor, run: Run) -> torch.Tensor:
    """What a run looks at; a view where it is in one piece."""
    parts = [values[..., start:stop, :] for start, stop in run.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _add(total: torch.Tensor, part: torch.Tensor, run: Run) -> None:
    """Add what belongs to a run's keys to where they are."""
    at = 0
    for start, stop in run.keys:
        total[..., start:stop, :] += part[..., at : at + stop - start, :]
        at += stop - start
