"""Linear layers of eight bits a weight, under LoRA weights that are trained.

Each row of a weight is whole numbers from -127 to 127 times a step of its own. They are widened layer by
layer, for the product that they are in and for its gradient; inputs and results keep their precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from etude.models.architecture import lora_exclusions

_MOST = 127


class EightBitWeights(nn.Linear):
    """`x @ (weight * step).T + bias`, with a `weight` [out, in] of bytes and a `step` [out, 1] in float32.

    It is a linear layer, so that peft puts LoRA weights on it; its own are never trained.
    """

    def __init__(self, layer: nn.Linear) -> None:
        """Take over what `layer` has; it keeps its own weight."""
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = layer.weight.detach().float()
        least = torch.finfo(torch.float32).tiny * _MOST
        step = weight.abs().amax(dim=1, keepdim=True).clamp_(min=least).div_(_MOST)
        self.weight = nn.Parameter((weight / step).round_().to(torch.int8), requires_grad=False)
        self.step = nn.Parameter(step, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], in the precision of `input`."""
        y: Tensor = _Product.apply(input, self.weight, self.step)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    def widened(self) -> Tensor:
        """The weight [out, in] in float32."""
        return self.weight * self.step


class _Product(torch.autograd.Function):
    """Whole numbers up to 127 are the same in every precision, and steps are factors of what is narrower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, step: Tensor) -> Tensor:
        """`x @ (weight * step).T`; nothing of `x` is kept."""
        ctx.save_for_backward(weight, step)
        return (x @ weight.to(x.dtype).t()).mul_(step.flatten())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Of `x` alone."""
        weight, step = ctx.saved_tensors
        return (grad * step.flatten().to(grad.dtype)) @ weight.to(grad.dtype), None, None


def rounded_layers(model: Any) -> dict[str, nn.Linear]:
    """The layers that `round_to_eight_bits` replaces, by name: those that LoRA weights may go on."""
    head, excluded = model.get_output_embeddings(), {*lora_exclusions(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and name not in excluded
    }


@torch.no_grad()
def round_to_eight_bits(model: Any, dtype: torch.dtype) -> None:
    """Put layers of eight bits in the place of a model's own, the rest into a precision, and freeze all.

    The rest is embeddings, norms, biases and the head.
    """
    for name, layer in rounded_layers(model).items():
        model.set_submodule(name, EightBitWeights(layer))
    for name, value in model.named_parameters():
        if value.is_floating_point() and not name.endswith(".step"):
            value.data = value.data.to(dtype)
    model.requires_grad_(False)


def has_eight_bits(model: Any) -> bool:
    """Whether any layer has."""
    return any(isinstance(module, EightBitWeights) for module in model.modules())
