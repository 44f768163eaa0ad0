"""A Llama's weights for inference: joined where they have the same input, with all that can be folded in.

In float32 a norm's weight is a part of the matrix after it. In bfloat16 it is not: the product would be
rounded once more, and the model sampled would not be the model trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etude.models.architecture import without_lora

_LEAST = 2**17
"""Elements of a weight below which oneDNN costs more than it saves."""


class PackedLinear:
    """`x @ weight.T + bias`, of a weight that must not change any more."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [out, in] and `bias` [out] in one dtype on a CPU."""
        self._weight, self._bias = weight.detach().t(), bias
        self._packed: torch.Tensor | None = None
        if weight.numel() >= _LEAST and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """From [N, in] to [N, out]; written to `out` where that is given."""
        if self._packed is not None:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return y if out is None else out.copy_(y)
        if out is not None and out.dtype != x.dtype:
            return out.copy_(self(x))
        if self._bias is None:
            return torch.mm(x, self._weight, out=out)
        return torch.addmm(self._bias, x, self._weight, out=out)

    def add_to(self, target: torch.Tensor, x: torch.Tensor) -> None:
        """Add what comes of `x` [N, in] to `target` [N, out], which is in float32 whatever `x` is in."""
        if x.dtype != target.dtype:
            target.add_(self(x))
            return
        if self._packed is not None:
            total = torch.ops.mkldnn._linear_pointwise.binary(x, target, self._packed, self._bias, "add")
            target.copy_(total)
            return
        target.addmm_(x, self._weight)
        if self._bias is not None:
            target.add_(self._bias)


_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length."""

Affine = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out, in] and bias [out]."""


class AfterNorm:
    """RMSNorm and the linear layer behind it, for vectors that were divided by their length already."""

    def __init__(self, norm: Any, affine: Affine) -> None:
        scale = norm.weight.float() * len(norm.weight) ** 0.5
        weight, bias = affine
        is_folded = weight.dtype == torch.float32
        self.scale = None if is_folded else scale
        """Factors of their elements [E], where these are no part of the linear layer."""
        self.linear = PackedLinear(weight * scale if is_folded else weight, bias)


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
    dtypes = {value.dtype for value in inner.parameters()}
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
    query, key, value = (affine(getattr(attention, f"{name}_proj")) for name in "qkv")
    head_norm = None
    if hasattr(attention, "q_norm"):
        norms = [attention.q_norm.weight] * queries + [attention.k_norm.weight]
        head_norm = _paired(torch.cat(norms), size).view(-1, size).float()
    biases = [bias for _, bias in (query, key, value) if bias is not None]
    joined = _by_group([weight for weight, _ in (query, key, value)], groups, size)
    bias = _by_group(biases, groups, size) if biases else None
    return FusedLayer(
        qkv=AfterNorm(layer.input_layernorm, (joined, bias)),
        head_norm=head_norm,
        out=PackedLinear(*affine(attention.o_proj)),
        gate_up=AfterNorm(
            layer.post_attention_layernorm, _stacked(affine(mlp.gate_proj), affine(mlp.up_proj))
        ),
        down=PackedLinear(*affine(mlp.down_proj)),
    )


def affine(module: Any) -> Affine:
    """Of a linear layer, with its LoRA weights."""
    if not hasattr(module, "get_delta_weight"):
        return module.weight, module.bias
    weight = module.base_layer.weight
    for name in module.active_adapters:
        weight = weight + module.get_delta_weight(name)
    return weight, module.base_layer.bias


def _by_group(qkv: Sequence[torch.Tensor], groups: int, size: int) -> torch.Tensor:
    """Rows of queries, keys and values [n * D, ...] in the order of FusedLayer.qkv."""
    query, key, value = qkv
    parts = [_paired(query, size), _paired(key, size), value]
    return torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _paired(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of heads, [n * D, ...], in the order that has what turns together side by side."""
    halves = rows.view(-1, 2, size // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _stacked(first: Affine, second: Affine) -> Affine:
    biases = [bias for _, bias in (first, second) if bias is not None]
    return torch.cat([first[0], second[0]]), torch.cat(biases) if biases else None


def _is_affine(module: Any) -> bool:
    """A linear layer, or one with plain LoRA weights."""
    if hasattr(module, "get_delta_weight"):
        return type(module.base_layer) is nn.Linear and not module.lora_variant
    return type(module) is nn.Linear
