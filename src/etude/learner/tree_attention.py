"""Attention over token trees: block by block on the CPU, FlexAttention's block masks on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from etude.learner import flex
from etude.learner.tree import Block, Lookers, TreeLayout
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
    if tree.kernel != "blocks":
        scores = flex.Scores(scale, softcap, window)
        found = flex.attend(query, key, value, tree.block_mask(window), scores, tree.kernel == "flex")
        return found.transpose(1, 2), None
    last = getattr(module, "layer_idx", None) == text_config(module).num_hidden_layers - 1
    lookers = tree.last if last else tree.all
    sight = Sight(tree, lookers, window, scale, softcap)
    if lookers is tree.all:
        return attend(query[0], key[0], value[0], sight).unsqueeze(0), None
    found_QHD = attend(query[0].index_select(1, lookers.places_Q), key[0], value[0], sight)
    out_NHD = query.new_zeros(query.shape[2], *found_QHD.shape[1:])
    return out_NHD.index_copy(0, lookers.places_Q, found_QHD).unsqueeze(0), None


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """How some tokens of a tree look at others."""

    tree: TreeLayout
    lookers: Lookers
    window: int | None
    """As `TreeLayout.binding` gives it."""
    scale: float
    softcap: float | None = None

    def mask(self, block: Block, dtype: torch.dtype) -> torch.Tensor | None:
        """See `TreeLayout.mask`; None where all of a block's queries see all of its keys."""
        if block.is_free and self.window is None:
            return None
        return self.tree.mask(self.lookers, block, self.window, dtype)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sight: Sight) -> torch.Tensor:
    """Queries [H, Q, D] over keys and values [G, N, D], H a multiple of G; gives [Q, H, D]."""
    query_GRQD = query.view(len(key), -1, *query.shape[1:])
    key_GRND, value_GRND = (x.unsqueeze(1).expand(-1, query_GRQD.shape[1], -1, -1) for x in (key, value))
    out_GRQD = _BlockAttention.apply(query_GRQD, key_GRND, value_GRND, sight)  # type: ignore[no-untyped-call]
    return out_GRQD.permute(2, 0, 1, 3).flatten(1, 2)  # type: ignore[no-any-return]


class _BlockAttention(torch.autograd.Function):
    """Queries [G, R, Q, D] over keys and values [G, R, N, D].

    What a query finds in one block and in another is weighed by the sums of the exponentials of its scores
    (Milakov and Gimelshein, 2018). In the backward pass, the sum over all blocks is that of each.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sight: Sight
    ) -> torch.Tensor:
        """Values by how much each query looks at their keys."""
        kernel = _kernel(query, sight)
        out, sums = _empty_beside(query), _empty_beside(query[..., :1], torch.float32)[..., 0]
        for block in sight.lookers.own:
            here, there = block.queries, block.keys
            out[..., here, :], sums[..., here] = kernel.look(
                query[..., here, :], key[..., there, :], value[..., there, :], sight.mask(block, query.dtype)
            )
        for block in sight.lookers.back:
            here, there = block.queries, block.keys
            found, sum_of = kernel.look(
                query[..., here, :], key[..., there, :], value[..., there, :], sight.mask(block, query.dtype)
            )
            total = torch.logaddexp(sums[..., here], sum_of)
            out[..., here, :].mul_((sums[..., here] - total).exp_().unsqueeze(-1))
            out[..., here, :].addcmul_(found, (sum_of - total).exp_().unsqueeze(-1))
            sums[..., here] = total
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.sight = sight
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each block adds to the gradients of its queries and keys."""
        query, key, value, out, sums = ctx.saved_tensors
        sight: Sight = ctx.sight
        kernel = _kernel(query, sight)
        of_query, of_key, of_value = (_empty_beside(x).zero_() for x in (query, key, value))
        for block in (*sight.lookers.own, *sight.lookers.back):
            here, there = block.queries, block.keys
            grads = kernel.back(
                grad_out[..., here, :],
                query[..., here, :],
                key[..., there, :],
                value[..., there, :],
                out[..., here, :],
                sums[..., here],
                sight.mask(block, query.dtype),
            )
            of_query[..., here, :] += grads[0]
            of_key[..., there, :] += grads[1]
            of_value[..., there, :] += grads[2]
        return of_query, of_key, of_value, None


def _kernel(query: torch.Tensor, sight: Sight) -> _Flash | _Plain:
    plain = query.device.type != "cpu" or sight.softcap is not None or sight.window is not None
    return _Plain(sight.scale, sight.softcap) if plain else _Flash(sight.scale)


@dataclass(frozen=True, slots=True)
class _Flash:
    """The CPU's flash kernel."""

    scale: float

    def look(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What queries find, and the logarithms of the sums of the exponentials of their scores."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, attn_mask=mask, scale=self.scale
        )

    def back(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of queries, keys and values; `out` and `sums` are those over all blocks."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad_out, query, key, value, out, sums, 0.0, False, attn_mask=mask, scale=self.scale
        )


@dataclass(frozen=True, slots=True)
class _Plain:
    """Attention as it is defined, also with a softcap, and for queries that see nothing of a block."""

    scale: float
    softcap: float | None

    def look(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `_Flash.look`."""
        scores, _ = self._scores(query, key, mask)
        sums = scores.logsumexp(dim=-1)
        return _exp(scores, sums).to(value.dtype) @ value, sums

    def back(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `_Flash.back`."""
        scores, slope = self._scores(query, key, mask)
        weights = _exp(scores, sums).to(value.dtype)
        of_weights = grad_out @ value.transpose(-1, -2) - (grad_out * out).sum(dim=-1, keepdim=True)
        of_scores = weights * of_weights * slope * self.scale
        return of_scores @ key, of_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad_out

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """What weights are the exponentials of, and the softcap's slope there."""
        scores = (query @ key.transpose(-1, -2) * self.scale).float()
        slope: torch.Tensor | float = 1.0
        if self.softcap is not None:
            capped = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, (1 - capped.square()).to(query.dtype)
        return scores if mask is None else scores + mask, slope


def _exp(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Weights; zeros for a query that sees nothing, whose sum is that of no numbers."""
    return torch.exp(scores - sums.clamp(min=torch.finfo(sums.dtype).min).unsqueeze(-1))


def _empty_beside(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor [G, R, N, D] that lies in memory as the model's projections do, [N, G, R, D]."""
    groups, repeats, size, width = like.shape
    return like.new_empty(size, groups, repeats, width, dtype=dtype).permute(1, 2, 0, 3)
