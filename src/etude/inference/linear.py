"""Linear layers for inference on a CPU, of weights that must not change any more: packed once, as they are or
rounded to eight bits.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TypeAlias

import torch

_LEAST = 2**17
"""Elements of a weight below which oneDNN costs more than it saves."""
_MOST = 127
"""Weights of eight bits are whole numbers from -127 to 127 times a scale of their row."""
_MOST_IN = 63
"""Inputs are from -63 to 63: CPUs without VNNI add two products in 16 bits, where larger ones do not fit."""
_FINE = 2 * _MOST_IN
"""Parts into which a step of the coarse half of an input is cut again."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """LoRA weights beside a linear layer: they add `x @ down.T @ up.T`."""

    down: torch.Tensor
    """[r, in]"""
    up: torch.Tensor
    """[out, r]"""

    def add_to(self, target: torch.Tensor, x: torch.Tensor) -> None:
        """Add what comes of `x` [N, in] to `target` [N, out]."""
        target.add_(x @ self.down.t() @ self.up.t())


class PackedLinear:
    """`x @ weight.T + bias`."""

    __slots__ = ("_bias", "_is_packed", "_low", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, low: LowRank | None = None) -> None:
        """`weight` [out, in], `bias` [out] and `low` in one dtype on a CPU."""
        self._bias, self._low = bias, low
        self._is_packed = weight.numel() >= _LEAST and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        weight = weight.detach()
        # The packed copy alone, as the other would take as much memory again.
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
            if self._is_packed
            else weight.t()
        )

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """From [N, in] to [N, out]; written to `out` where that is given."""
        y = self._plain(x, out)
        if self._low is not None:
            self._low.add_to(y, x)
        return y

    def _plain(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if self._is_packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
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
            if self._low is not None:  # Apart: small numbers stay what they are in float32.
                self._low.add_to(target, x)
            return
        if self._is_packed:
            total = torch.ops.mkldnn._linear_pointwise.binary(x, target, self._weight, self._bias, "add")
            target.copy_(total)
            return
        target.addmm_(x, self._weight)
        if self._bias is not None:
            target.add_(self._bias)


class EightBitLinear:
    """`x @ weight.T + bias` in float32, each row of the weight rounded to multiples of a step of its own.

    The kernel multiplies inputs of eight bits, with one step for all of them. So each row comes in two
    halves, the coarse one and 126 times what it leaves, both as multiples of the row's own step: a row gives
    what its float32 numbers would to one part in ten thousand, whatever the rows beside it.
    """

    __slots__ = ("_bias", "_ends", "_low", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, low: LowRank | None = None) -> None:
        """`weight` [out, in], `bias` [out] and `low` on a CPU."""
        weight = weight.float()
        scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny * _MOST) / _MOST
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # That quantised tensors will be made by another package some day.
            zeros = torch.zeros(len(weight), dtype=torch.long)
            rounded = torch.quantize_per_channel(weight, scale.double(), zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(rounded, None)
        self._bias, self._low = bias, low
        self._ends = torch.zeros(1, weight.shape[1])
        # They make a step of the kernel's be one, and its numbers from 1 to 127 (that of zero is 64).
        self._ends[0, :2] = torch.tensor([-_MOST_IN - 1, 254 - _MOST_IN])

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """From [N, in] to [N, out]; written to `out` where that is given."""
        x = x.float()
        step_N1 = x.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).div_(_MOST_IN)
        steps = x / step_N1
        coarse = steps.round()
        fine = steps.sub_(coarse).mul_(_FINE)
        both = torch.ops.quantized.linear_dynamic(torch.cat([coarse, fine, self._ends]), self._packed)
        into = None if out is None or out.dtype != x.dtype else out
        y = torch.add(both[: len(x)], both[len(x) : -1], alpha=1 / _FINE, out=into).mul_(step_N1)
        if self._bias is not None:
            y.add_(self._bias)
        if self._low is not None:
            self._low.add_to(y, x)
        return y if out is None or out is into else out.copy_(y)

    def add_to(self, target: torch.Tensor, x: torch.Tensor) -> None:
        """Add what comes of `x` [N, in] to `target` [N, out]."""
        target.add_(self(x))


Linear: TypeAlias = PackedLinear | EightBitLinear
