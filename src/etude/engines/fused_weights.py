"""A Llama's or Gemma's weights for inference: joined if they share an input, folded where that is exact.

In float32, a norm's weight becomes a part of the matrix after it, and LoRA weights are merged. In bfloat16
they stay separate: another rounding would lose everything below a 500th of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from etude.models.architecture import without_lora

_LLAMAS = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
_GEMMAS = "GemmaForCausalLM", "Gemma3ForCausalLM"
"""Models that scale their embeddings, and multiply by a norm's weight plus one."""
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length."""

_LEAST = 2**17
"""Elements of a weight below which oneDNN costs more than it saves."""

InOrder: TypeAlias = Callable[[list[torch.Tensor]], torch.Tensor]
"""Joins rows [out, ...] of several layers."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """LoRA weights of a linear layer: they add `x @ down.T @ up.T`."""

    down: torch.Tensor
    """[r, in]"""
    up: torch.Tensor
    """[out, r]"""


class PackedLinear:
    """A linear layer, `x @ weight.T + bias`, with its LoRA weights if they are not merged."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, low: LowRank | None = None) -> None:
        """`weight` [out, in], `bias` [out] and `low` have one dtype and are on one device."""
        self._bias, self._low, self._dtype = bias, low, weight.dtype
        # This CPU's oneDNN may lack the instructions for bfloat16.
        packs = torch.backends.mkldnn.is_available() and (  # type: ignore[no-untyped-call]
            weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        self._is_packed = weight.device.type == "cpu" and weight.numel() >= _LEAST and bool(packs)
        self._weight = weight.detach().t()
        if self._is_packed:  # Keep only the packed copy: the other one would take as much memory again.
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, in] to [N, out] in float32, in which LoRA weights' small numbers keep their precision."""
        x, weight = x.to(self._dtype), self._weight
        if self._is_packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, self._bias, "none", [], "")
        else:
            y = torch.mm(x, weight) if self._bias is None else torch.addmm(self._bias, x, weight)
        y = y.float()
        return y if self._low is None else y.add_(x @ self._low.down.t() @ self._low.up.t())


class AfterNorm:
    """RMSNorm and the linear layer after it, for vectors that were already divided by their length."""

    def __init__(self, norm: Any, modules: Sequence[Any], in_order: InOrder = torch.cat) -> None:
        """`modules` are linear layers with the same input, as for `linear`."""
        scale = norm_scale(norm) * len(norm.weight) ** 0.5
        is_folded = norm.weight.dtype == torch.float32
        self.scale = None if is_folded else scale
        """Factors [E] of the vectors' elements; None if they are folded into the linear layer."""
        self.linear = linear(modules, in_order, scale if is_folded else None)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of a layer, with the two numbers of each rotation side by side."""

    qkv: AfterNorm
    """For each group of heads with common keys: R queries, a key and a value, [G * (R + 2) * D, E]."""
    head_norm: torch.Tensor | None
    """Norm factors of a group's queries and key, [R + 1, D] in float32."""
    out: PackedLinear
    out_norm: torch.Tensor | None
    """Norm factors [E] in float32 of the result of `out`, if it is normed before it is added."""
    gate_up: AfterNorm
    down: PackedLinear
    down_norm: torch.Tensor | None


def can_fuse(model: Any) -> bool:
    """Return whether FusedLlama supports the whole model: on a CPU, or on CUDA in bfloat16."""
    devices = {value.device.type for value in model.parameters()}
    if devices not in ({"cpu"}, {"cuda"}):
        return False
    config = without_lora(model).config
    if devices == {"cuda"} and not (model.dtype == torch.bfloat16 and _flash_takes(config)):
        return False
    if is_gemma(model):
        caps = "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        knows_rest = activation == "gelu_pytorch_tanh" and not any(getattr(config, cap, None) for cap in caps)
        return _is_plain(model, _GEMMAS) and knows_rest
    return is_llama(model)


def _flash_takes(config: Any) -> bool:
    """Return whether CUDA's flash kernels take heads of this width."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return bool(size % 8 == 0 and size <= 256)


def is_llama(model: Any) -> bool:
    """Return whether it is a Llama or a close relative, in float32 or bfloat16, without modifications."""
    return _is_plain(model, _LLAMAS) and without_lora(model).config.hidden_act == "silu"


def is_gemma(model: Any) -> bool:
    """Return whether it scales its embeddings, and multiplies by a norm's weight plus one."""
    return type(without_lora(model)).__name__ in _GEMMAS


def _is_plain(model: Any, classes: Sequence[str]) -> bool:
    """Return whether it has one of these classes of `transformers`, and nothing in it was replaced."""
    inner = without_lora(model)
    known = type(inner).__name__ in classes and type(inner).__module__.startswith("transformers.models.")
    if not known or "forward" in vars(inner) or "forward" in vars(model):
        return False  # A replaced forward pass must be called.
    dtypes = {
        value.dtype
        for name, module in inner.named_modules()
        if ".lora_" not in name
        for value in module.parameters(recurse=False)
    }
    body = inner.model
    ropes = body.rotary_emb.rope_type
    ropes = {ropes} if isinstance(ropes, str) else {*ropes.values()}
    return (
        dtypes in ({torch.float32}, {torch.bfloat16})
        and ropes <= {*_FIXED_ROPE}
        and isinstance(body.embed_tokens, nn.Embedding)
        and isinstance(inner.lm_head, nn.Linear)
        and all(_is_affine(module) for name, module in body.layers.named_modules() if name.endswith("_proj"))
    )


def norm_scale(norm: Any) -> torch.Tensor:
    """Return the factors [E] of a norm in float32."""
    scale: torch.Tensor = norm.weight.detach().float()
    return scale + 1 if type(norm).__name__.startswith("Gemma") else scale


def fused_layer(layer: Any, config: Any) -> FusedLayer:
    """Return the weights of a decoder layer."""
    attention, mlp = layer.self_attn, layer.mlp
    size, groups = attention.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads // groups
    head_norm = None
    if hasattr(attention, "q_norm"):
        norms = [norm_scale(attention.q_norm)] * queries + [norm_scale(attention.k_norm)]
        head_norm = _pair_rotations(torch.cat(norms), size).view(-1, size)
    qkv, in_order = [attention.q_proj, attention.k_proj, attention.v_proj], partial(_by_group, groups, size)
    before_mlp, out_norm, down_norm = layer.post_attention_layernorm, None, None
    if hasattr(layer, "pre_feedforward_layernorm"):
        before_mlp, root = layer.pre_feedforward_layernorm, config.hidden_size**0.5
        out_norm = norm_scale(layer.post_attention_layernorm) * root
        down_norm = norm_scale(layer.post_feedforward_layernorm) * root
    return FusedLayer(
        qkv=AfterNorm(layer.input_layernorm, qkv, in_order),
        head_norm=head_norm,
        out=linear([attention.o_proj]),
        out_norm=out_norm,
        gate_up=AfterNorm(before_mlp, [mlp.gate_proj, mlp.up_proj]),
        down=linear([mlp.down_proj]),
        down_norm=down_norm,
    )


def linear(
    modules: Sequence[Any], in_order: InOrder = torch.cat, scale: torch.Tensor | None = None
) -> PackedLinear:
    """Join linear layers with the same input into one, with their LoRA weights.

    In float32, LoRA weights are merged. `scale` has factors [in] of the input, for merged layers only.
    """
    bases = [getattr(module, "base_layer", module) for module in modules]
    lows = [_low_rank(module) for module in modules]
    weights = [base.weight.detach() for base in bases]
    merges = weights[0].dtype == torch.float32
    low = None if merges else _join_lora(lows, weights, in_order)
    if merges:
        pairs = zip(weights, lows, strict=True)
        weights = [weight if one is None else torch.addmm(weight, one.up, one.down) for weight, one in pairs]
    biases = [base.bias.detach() for base in bases if base.bias is not None]
    # Large copies take longer than what is done with them, so there is none without need.
    weight, is_own = weights[0], len(weights) == 1 and weights[0].data_ptr() == bases[0].weight.data_ptr()
    if len(weights) > 1:
        weight = in_order(weights)
    if scale is not None:
        weight = weight * scale if is_own else weight.mul_(scale)
    return PackedLinear(weight, in_order(biases) if biases else None, low)


def _low_rank(module: Any) -> LowRank | None:
    """Return the LoRA weights of a linear layer, or None."""
    if not hasattr(module, "get_delta_weight"):
        return None
    downs = [module.lora_A[name].weight.detach() for name in module.active_adapters]
    ups = [module.lora_B[name].weight.detach() * module.scaling[name] for name in module.active_adapters]
    return LowRank(torch.cat(downs), torch.cat(ups, dim=1))


def _join_lora(
    lows: Sequence[LowRank | None], weights: Sequence[torch.Tensor], in_order: InOrder
) -> LowRank | None:
    """Join the LoRA weights of layers into one pair; each layer adds to its own rows."""
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
    """Return rows of queries, keys and values [n * D, ...] in the order of `FusedLayer.qkv`."""
    query, key, value = qkv
    parts = [_pair_rotations(query, size), _pair_rotations(key, size), value]
    return torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _pair_rotations(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows of heads [n * D, ...], reordered so that the two of each rotation are side by side."""
    halves = rows.view(-1, 2, size // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _is_affine(module: Any) -> bool:
    if hasattr(module, "get_delta_weight"):
        return type(module.base_layer) is nn.Linear and not module.lora_variant
    return type(module) is nn.Linear
