"""A Llama's decoder over a token tree with fewer passes through memory; and gradient checkpointing.

States go from layer to layer in float32 for any dtype of the weights. They are rounded to the weights'
precision before each product.

Gradient checkpointing (Chen et al., 2016) works for any model: what happens inside a layer is computed again
for the gradient, and not kept. The switch of `transformers` works in training mode only, where models also
drop activations at random. Here the layers themselves are wrapped, for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from etude.core.errors import RequestError
from etude.engines.fused_llama import is_llama
from etude.learner.tree import TreeLayout
from etude.learner.tree_attention import AttentionSpec, attend, attending
from etude.models.architecture import SLIDING, layer_kinds, text_config


def checkpointable_layers(model: Any) -> list[torch.nn.Module]:
    """Return the layers that can be computed again. Raises RequestError if the model does not name them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        kind = text_config(model).model_type
        raise RequestError(
            f"gradient_checkpointing: models of the type '{kind}' do not say what their layers are; leave it "
            "out, and lower token_budget where memory is short"
        )
    return layers


@contextmanager
def checkpointing_layers(model: Any) -> Iterator[None]:
    """Within the block, forward passes keep only the values between layers. Raises RequestError."""
    layers, config = checkpointable_layers(model), text_config(model)
    for layer in layers:
        layer.forward = partial(_again, config, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def is_checkpointed(layer: Any) -> bool:
    """Return whether a layer is wrapped by `checkpointing_layers`, and by nothing else."""
    forward = vars(layer).get("forward")
    known = isinstance(forward, partial) and forward.func is _again
    return known and getattr(forward.args[1], "__func__", None) is type(layer).forward


def _again(config: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    attention = config._attn_implementation

    def run(*args: Any, **kwargs: Any) -> Any:
        # The second run is in the backward pass, when the model may use its usual attention again.
        with attending(config, attention):
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def is_lean(model: Any) -> bool:
    """Return whether `lean_hidden` supports the whole model. `model` has no LoRA weights around it."""
    devices = {value.device.type for value in model.parameters()}
    return (
        is_llama(model)
        and devices <= {"cpu", "cuda"}
        and not any(
            ("forward" in vars(layer) and not is_checkpointed(layer)) or layer._forward_pre_hooks
            for layer in model.model.layers
        )
    )


def lean_hidden(model: Any, ids_N: Tensor, layout: TreeLayout) -> Tensor:
    """Return the last hidden states [Q, E] of the tokens `layout.last`, up to rounding the model's own."""
    body = model.model
    x_NE = body.embed_tokens(ids_N).float()
    cos_1ND, sin_1ND = body.rotary_emb(x_NE[None], layout.depths_N[None])
    half = cos_1ND.shape[-1] // 2
    turn_N1C = torch.complex(cos_1ND[0, :, :half], sin_1ND[0, :, :half])[:, None]
    more_NE: Tensor | None = None
    for layer, kind in zip(body.layers, layer_kinds(model), strict=True):
        window = model.config.sliding_window if kind == SLIDING else None
        layout.windows.append(window)
        queries = layout.last if layer is body.layers[-1] else layout.all
        scale = layer.self_attn.scaling
        spec = AttentionSpec(layout, queries, scale, window=layout.binding(window))
        if is_checkpointed(layer):  # Keep only its input for the gradient.
            args = layer, x_NE if more_NE is None else x_NE + more_NE, None, turn_N1C, spec
            x_NE, more_NE = checkpoint(_layer, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            x_NE, more_NE = _layer(layer, x_NE, more_NE, turn_N1C, spec)
    return _add_and_norm(body.norm, x_NE, more_NE)[1]


def _layer(
    layer: Any, x_NE: Tensor, more_NE: Tensor | None, turn_N1C: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return the states [Q, E] after a layer from those [N, E] before it, each in two parts to be added."""
    attention, mlp, queries = layer.self_attn, layer.mlp, spec.queries
    x_NE, normed_NE = _add_and_norm(layer.input_layernorm, x_NE, more_NE)
    key = _rotate(_heads(attention, "k", normed_NE), turn_N1C)
    value = _heads(attention, "v", normed_NE)
    rows, by_levels = queries.places_Q, spec.uses_levels(normed_NE, attention.head_dim)
    if not by_levels and len(rows) < len(x_NE):
        x_NE, normed_NE, turn_N1C = (x.index_select(0, rows) for x in (x_NE, normed_NE, turn_N1C))
    query = _rotate(_heads(attention, "q", normed_NE), turn_N1C)
    mixed = attend(query, key, value, spec)
    if by_levels and len(rows) < len(x_NE):
        x_NE, mixed = (x.index_select(0, rows) for x in (x_NE, mixed))
    x_QE, normed_QE = _add_and_norm(
        layer.post_attention_layernorm, x_NE, _linear(attention.o_proj, mixed.flatten(1))
    )
    gate, up = _linear(mlp.gate_proj, normed_QE), _linear(mlp.up_proj, normed_QE)
    return x_QE, _linear(mlp.down_proj, _Gate.apply(gate, up))  # type: ignore[no-untyped-call]


def _heads(attention: Any, name: str, x_NE: Tensor) -> Tensor:
    """Return queries, keys or values [N, H, D]."""
    heads = _linear(getattr(attention, f"{name}_proj"), x_NE).view(len(x_NE), -1, attention.head_dim)
    norm = getattr(attention, f"{name}_norm", None)
    return heads if norm is None else _Norm.apply(heads, norm.weight, norm.variance_epsilon)  # type: ignore


def _linear(module: Any, x: Tensor) -> Tensor:
    """Apply a linear layer with its LoRA weights."""
    if not hasattr(module, "lora_A"):
        return module(x)  # type: ignore[no-any-return]
    y: Tensor = module.base_layer(x)
    for name in module.active_adapters:
        down, up = module.lora_A[name].weight, module.lora_B[name].weight
        y = _LowRank.apply(y, x, down, up, module.scaling[name])  # type: ignore[no-untyped-call]
    return y


def _add_and_norm(norm: Any, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states plus `more` in float32, and the same normed."""
    if more is None:
        return x, _Norm.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    found: tuple[Tensor, Tensor] = _Sum.apply(x, more, norm.weight, norm.variance_epsilon)  # type: ignore
    return found


def _rotate(heads_NHD: Tensor, turn_N1C: Tensor) -> Tensor:
    turned: Tensor = _Turn.apply(heads_NHD, turn_N1C)  # type: ignore[no-untyped-call]
    return turned


class _Turn(torch.autograd.Function):
    """Rotary embedding (Su et al., 2021) of queries or keys; the two of each rotation are then adjacent."""

    @staticmethod
    def forward(ctx: Any, heads_NHD: Tensor, turn_N1C: Tensor) -> Tensor:
        """Rotate in float32; the result has the precision of the heads."""
        ctx.save_for_backward(turn_N1C)
        real, imaginary = heads_NHD.float().unflatten(-1, (2, -1)).unbind(-2)  # type: ignore[no-untyped-call]
        turned = torch.complex(real, imaginary).mul_(turn_N1C)
        return torch.view_as_real(turned).flatten(-2).to(heads_NHD.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (turn_N1C,) = ctx.saved_tensors
        grad_NHC2 = grad.float().unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
        turned = torch.view_as_complex(grad_NHC2) * turn_N1C.conj()
        return torch.cat([turned.real, turned.imag], dim=-1).to(grad.dtype), None


class _Norm(torch.autograd.Function):
    """RMSNorm (Zhang and Sennrich, 2019): w · x / sqrt(mean(x²) + ε) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return RMSNorm in the shape of `x` and the precision of `weight`."""
        normed, scale = _norm(x, weight, epsilon)
        ctx.save_for_backward(x, scale, weight)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        of_x, of_weight = _normed_back(grad, x, scale, weight, ctx.needs_input_grad[1])
        return of_x.to(x.dtype), of_weight, None


class _Sum(torch.autograd.Function):
    """A sum in float32, and its RMSNorm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return the sum of `x` and `more`; and the same, normed, in the precision of `weight`."""
        x = x + more
        normed, scale = _norm(x, weight, epsilon)
        ctx.save_for_backward(x, scale, weight)
        ctx.dtype = more.dtype
        return x, normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_normed: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        of_x, of_weight = _normed_back(of_normed, x, scale, weight, ctx.needs_input_grad[2])
        of_x += grad
        return of_x, of_x.to(ctx.dtype), of_weight, None


class _LowRank(torch.autograd.Function):
    """LoRA weights A and B (Hu et al., 2021) of a layer that gave y: y + s · (x · Aᵀ) · Bᵀ.

    They are in float32. For an `x` in half precision, peft keeps a float32 copy in each layer that reads it.
    That is half of all memory kept for the gradient.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Return the result for `y` [N, out] and `x` [N, in], with A [r, in] and B [out, r]."""
        ctx.save_for_backward(x, down, up)
        ctx.scale = scale
        return torch.addmm(y.to(up.dtype), x.to(down.dtype) @ down.t(), up.t(), alpha=scale).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up = ctx.saved_tensors
        x_Ni, grad_No = x.to(down.dtype), grad.to(up.dtype) * ctx.scale
        of_low_Nr = grad_No @ up
        of_up = grad_No.t() @ (x_Ni @ down.t())
        return grad, (of_low_Nr @ down).to(x.dtype), of_low_Nr.t() @ x_Ni, of_up, None


class _Gate(torch.autograd.Function):
    """The gate of an MLP (Shazeer, 2020): silu(gate) · up. Only the two inputs are kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of `x`, and the factors of its rows."""
    x = x.float()
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (x * scale).mul_(weight).to(weight.dtype), scale


def _normed_back(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, is_trained: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x, in float32, and of the weight. If y = x·s has the gradient g, x has the
    gradient s·(g - y·mean(g·y))."""
    grad, x, weight_E, of_weight = grad.float(), x.float(), weight.float(), None
    product = grad * x
    sums = (product @ weight_E).unsqueeze(-1)
    if is_trained:
        of_weight = (scale.flatten() @ product.flatten(0, -2)).to(weight.dtype)
    mean = sums.mul_(scale.square()).div_(x.shape[-1])
    return (grad * weight_E).addcmul_(x, mean, value=-1).mul_(scale), of_weight
