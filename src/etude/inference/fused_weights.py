"""A Llama's weights for inference: joined where they have the same input, with all that can be folded in.

In float32 a norm's weight is a part of the matrix after it, and LoRA weights are merged. In bfloat16 they are
not: all would be rounded once more, and what is less than a 500th of a weight would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from etude.inference.linear import EightBitLinear, Linear, LowRank, PackedLinear
from etude.models.architecture import without_lora

_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length."""


InOrder: TypeAlias = Callable[[list[torch.Tensor]], torch.Tensor]
"""Puts rows [out, ...] of several layers together."""


class AfterNorm:
    """RMSNorm and the linear layer behind it, for vectors that were divided by their length already."""

    def __init__(
        self, norm: Any, modules: Sequence[Any], *, eight_bits: bool, in_order: InOrder = torch.cat
    ) -> None:
        """`modules` are linear layers of the same input, as for `linear`."""
        scale = norm.weight.detach().float() * len(norm.weight) ** 0.5
        is_folded = norm.weight.dtype == torch.float32 and not eight_bits
        self.scale = None if is_folded else scale
        """Factors of their elements [E], where these are no part of the linear layer."""
        self.linear = linear(
            modules, eight_bits=eight_bits, in_order=in_order, scale=scale if is_folded else None
        )


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of a layer, in which what turns is side by side."""

    qkv: AfterNorm
    """For each group of heads that share keys its R queries, its key and its value: [G * (R + 2) * D, E]."""
    head_norm: torch.Tensor | None
    """Of a group's queries and key, [R + 1, D] in float32."""
    out: Linear
    gate_up: AfterNorm
    down: Linear


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


def fused_layer(layer: Any, config: Any, *, eight_bits: bool) -> FusedLayer:
    """The weights of a decoder layer."""
    attention, mlp = layer.self_attn, layer.mlp
    size, groups = attention.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads // groups
    head_norm = None
    if hasattr(attention, "q_norm"):
        norms = [attention.q_norm.weight] * queries + [attention.k_norm.weight]
        head_norm = _paired(torch.cat(norms), size).view(-1, size).float()
    qkv, in_order = [attention.q_proj, attention.k_proj, attention.v_proj], partial(_by_group, groups, size)
    gate_up = [mlp.gate_proj, mlp.up_proj]
    return FusedLayer(
        qkv=AfterNorm(layer.input_layernorm, qkv, eight_bits=eight_bits, in_order=in_order),
        head_norm=head_norm,
        out=linear([attention.o_proj], eight_bits=eight_bits),
        gate_up=AfterNorm(layer.post_attention_layernorm, gate_up, eight_bits=eight_bits),
        down=linear([mlp.down_proj], eight_bits=eight_bits),
    )


def linear(
    modules: Sequence[Any],
    *,
    eight_bits: bool,
    in_order: InOrder = torch.cat,
    scale: torch.Tensor | None = None,
) -> Linear:
    """One linear layer that does what several of the same input do, with their LoRA weights.

    In float32 these are merged. `scale` are factors of the input [in], for layers that are merged.
    """
    bases = [getattr(module, "base_layer", module) for module in modules]
    weights = [base.weight.detach() for base in bases]
    lows = [_low_rank(module) for module in modules]
    merges = weights[0].dtype == torch.float32 and not eight_bits
    if merges:
        pairs = zip(weights, lows, strict=True)
        weights = [weight if low is None else weight + low.up @ low.down for weight, low in pairs]
    biases = [base.bias.detach() for base in bases if base.bias is not None]
    weight, bias = in_order(weights), in_order(biases) if biases else None
    low = None if merges else _beside(lows, weights, in_order)
    if eight_bits:
        return EightBitLinear(weight, bias, low)
    return PackedLinear(weight if scale is None else weight * scale, bias, low)


def _low_rank(module: Any) -> LowRank | None:
    """The LoRA weights of a linear layer, if it has some."""
    if not hasattr(module, "get_delta_weight"):
        return None
    names = module.active_adapters
    downs = [module.lora_A[name].weight.detach() for name in names]
    ups = [module.lora_B[name].weight.detach() * module.scaling[name] for name in names]
    return LowRank(torch.cat(downs), torch.cat(ups, dim=1))


def _beside(
    lows: Sequence[LowRank | None], weights: Sequence[torch.Tensor], in_order: InOrder
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


def _by_group(groups: int, size: int, qkv: Sequence[torch.Tensor]) -> torch.Tensor:
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
