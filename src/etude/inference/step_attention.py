"""Attention of single-token steps, as two matrix products.

On a CPU and in float32, the kernel behind `scaled_dot_product_attention` takes about twice as long
for one query per row as the plain products do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from etude.models.architecture import text_config

_NAME = "etude_step"
_LEAST_ROWS = 32
"""Below that the kernel is as fast."""


@contextmanager
def step_attention(model: Any, *, alone: bool) -> Iterator[None]:
    """Within the block the model attends this way, if it would use `sdpa` otherwise.

    `alone` says that each row of the forward pass has a single query; without it nothing changes.
    """
    config = text_config(model)
    usual = config._attn_implementation
    if not alone or usual != "sdpa":
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
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
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One query [B, H, 1, D] over keys and values [B, G, S, D], H a multiple of G; gives [B, 1, H, D]."""
    rows, heads, _, size = query.shape
    plain = attention_mask.shape[1] == 1 and kwargs.get("position_bias") is None
    on_cpu = query.device.type == "cpu" and query.dtype == torch.float32
    if rows < _LEAST_ROWS or not plain or not on_cpu:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    groups = key.shape[1]
    query_BGQD = query.view(rows, groups, heads // groups, size)
    scores = torch.matmul(query_BGQD, key.transpose(2, 3)).mul_(size**-0.5 if scaling is None else scaling)
    shares = torch.softmax(scores.add_(attention_mask), dim=-1)
    return torch.matmul(shares, value).view(rows, 1, heads, value.shape[-1]), None
