"""A Llama's weights for inference: joined where they have the same input, with all that can be folded in.

In float32 a norm's weight is a part of the matrix after it, and LoRA weights are merged. In bfloat16 they are
not: all would be rounded once more, and what is less than a 500th of a weight would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from etude.models.architecture import without_lora

_LEAST = 2**17
"""Elements of a weight below which oneDNN costs more than it saves."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """LoRA weights beside a linear layer: they add `x @ down.T @ up.T`."""

    down: torch.Tensor
    """[r, in]"""
    up: torch.Tensor
    """[out, r]"""


class PackedLinear:
    """`x @ weight.T + bias`, of a weight that must not change any more."""

    __slots__ = ("_bias", "_low", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, low: LowRank | None = None) -> None:
        """`weight` [out, in], `bias` [out] and `low` in one dtype on a CPU."""
        self._weight, self._bias, self._low = weight.detach().t(), bias, low
        self._packed: torch.Tensor | None = None
        if weight.numel() >= _LEAST and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """From [N, in] to [N, out]; written to `out` where that is given."""
        y = self._plain(x, out)
        self._add_low_rank(y, x)
        return y

    def _plain(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if self._packed is not None:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return y if out is None else out.copy_(y)
        if out is not None and out.dtype != x.dtype:
            return out.copy_(self._plain(x, None))
        if self._bias is None:
            return torch.mm(x, self._weight, out=out)
        return torch.addmm(self._bias, x, self._weight, out=out)

    def add_to(self, target: torch.Tensor, x: torch.Tensor) -> None:
        """Add what comes of `x` [N, in] to `target` [N, out], which is in float32 whatever `x` is in."""
        if x.dtype != target.dtype:
            target.add_(self._plain(x, None))
            self._add_low_rank(target, x)  # Apart: small numbers stay what they are in float32.
            return
        if self._packed is not None:
            total = torch.ops.mkldnn._linear_pointwise.binary(x, target, self._packed, self._bias, "add")
            target.copy_(total)
            return
        target.addmm_(x, self._weight)
        if self._bias is not None:
            target.add_(self._bias)

    def _add_low_rank(self, target: torch.Tensor, x: torch.Tensor) -> None:
        if self._low is not None:
            target.add_(x @ self._low.down.t() @ self._low.up.t())


_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length."""


class AfterNorm:
    """RMSNorm and the linear layer behind it, for vectors that were divided by their length already."""

    def __init__(
        self, norm: Any, weight: torch.Tensor, bias: torch.Tensor | None, low: LowRank | None
    ) -> None:
        scale = norm.weight.float() * len(norm.weight) ** 0.5
        is_folded = weight.dtype == torch.float32
        self.scale = None if is_folded else scale
        """Factors of their elements [E], where these are no part of the linear layer."""
        self.linear = PackedLinear(weight * scale if is_folded else weight, bias, low)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of a layer, in which what turns is side by side."""

    qkv: AfterNorm
    """For each group of heads that share keys its R queries, its key and its value: [G * (R + 2) * D, E]."""
    head_norm: torch.Tensor | None
    """Of a group's queries and key, [R + 1, D] in float32."""
    out: PackedLinear
    gate_up: AfterNorm
    down: PackedLinear


def can_fuse(model: Any) -> bool:
    """Whether FusedLlama knows all that the model does."""
    inner = without_lora(model)
    known = type(inner).__name__ in _CLASSES and type(inner).__module__.startswith("transformers.models.")
    if not known or "forward" in vars(inner) or "forward" in vars(model):
        return False  # Where someone stands before the forward pass, it is to be asked.
    dtypes = {value.dtype for name, value in inner.named_parameters() if ".lora_" not in name}
    body = inner.model
    return (
        all(value.device.type == "cpu" for value in model.parameters())
        and dtypes in ({torch.float32}, {torch.bfloat16})
        and body.rotary_emb.rope_type in _FIXED_ROPE
        and inner.config.hidden_act == "silu"
        and isinstance(body.embed_tokens, nn.Embedding)
        and isinstance(inner.lm_head, nn.Linear)
        and all(_is_affine(module) for name, module in body.layers.named_modules() if name.endswith("_proj"))
    )


def fused_layer(layer: Any, config: Any) -> FusedLayer:
    """The weights of a decoder layer, LoRA weights merged in."""
    attention, mlp = layer.self_attn, layer.mlp
    size, groups = attention.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads // groups
    projections = [getattr(attention, f"{name}_proj") for name in "qkv"]
    head_norm = None
    if hasattr(attention, "q_norm"):
        norms = [attention.q_norm.weight] * queries + [attention.k_norm.weight]
        head_norm = _paired(torch.cat(norms), size).view(-1, size).float()
    in_order = partial(_by_group, groups=groups, size=size)
    return FusedLayer(
        qkv=AfterNorm(layer.input_layernorm, *joined(projections, in_order)),
        head_norm=head_norm,
        out=PackedLinear(*joined([attention.o_proj])),
        gate_up=AfterNorm(layer.post_attention_layernorm, *joined([mlp.gate_proj, mlp.up_proj])),
        down=PackedLinear(*joined([mlp.down_proj])),
    )


def joined(
    modules: Sequence[Any], in_order: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat
) -> tuple[torch.Tensor, torch.Tensor | None, LowRank | None]:
    """Weight, bias and LoRA weights of one linear layer that does what several of the same input do.

    `in_order` puts their rows [out, ...] together. In float32 LoRA weights are part of the weight.
    """
    bases = [getattr(module, "base_layer", module) for module in modules]
    weights = [base.weight.detach() for base in bases]
    lows = [_low_rank(module) for module in modules]
    merges = weights[0].dtype == torch.float32
    if merges:
        weights = [
            weight if low is None else weight + low.up @ low.down
            for weight, low in zip(weights, lows, strict=True)
        ]
    biases = [base.bias.detach() for base in bases if base.bias is not None]
    low = None if merges else _beside(lows, weights, in_order)
    return in_order(weights), in_order(biases) if biases else None, low


def _low_rank(module: Any) -> LowRank | None:
    """The LoRA weights of a linear layer, if it has some."""
    if not hasattr(module, "get_delta_weight"):
        return None
    names = module.active_adapters
    downs = [module.lora_A[name].weight.detach() for name in names]
    ups = [module.lora_B[name].weight.detach() * module.scaling[name] for name in names]
    return LowRank(torch.cat(downs), torch.cat(ups, dim=1))


def _beside(
    lows: Sequence[LowRank | None],
    weights: Sequence[torch.Tensor],
    in_order: Callable[[list[torch.Tensor]], torch.Tensor],
) -> LowRank | None:
    """The LoRA weights of layers as those of one, each adding to its own rows."""
    known = [low for low in lows if low is not None]
    if not known:
        return None
    rank, before, ups = sum(len(low.down) for low in known), 0, []
    for low, weight in zip(lows, weights, strict=True):
        up = weight.new_zeros(len(weight), rank)
        if low is not None:
            up[:, before : before + len(low.down)] = low.up
            before += len(low.down)
        ups.append(up)
    return LowRank(torch.cat([low.down for low in known]).to(weights[0].dtype), in_order(ups))


def _by_group(qkv: Sequence[torch.Tensor], groups: int, size: int) -> torch.Tensor:
    """Rows of queries, keys and values [n * D, ...] in the order of FusedLayer.qkv."""
    query, key, value = qkv
    parts = [_paired(query, size), _paired(key, size), value]
    return torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _paired(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of heads, [n * D, ...], in the order that has what turns together side by side."""
    halves = rows.view(-1, 2, size // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _is_affine(module: Any) -> bool:
    """A linear layer, or one with plain LoRA weights."""
    if hasattr(module, "get_delta_weight"):
        return type(module.base_layer) is nn.Linear and not module.lora_variant
    return type(module) is nn.Linear
