"""A device that is pretended: its tensors are the CPU's, and for them to meet one of the CPU's is an error.

It shows that no operation mixes devices or waits too often. Importing this changes torch for the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

torch.utils.backend_registration._setup_privateuseone_for_python_backend()
DEVICE = torch.device("privateuseone", 0)
aten = torch.ops.aten
_MAY_MIX = {aten.copy_.default, aten.index.Tensor, aten.index_put_.default}
"""As CUDA does: indices may be the CPU's, and copies go from one to the other."""


class MixedDevices(AssertionError):
    """An operation that a device would refuse."""


class Pretended(torch.Tensor):
    """A tensor of the CPU that says that it is on the device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        made: Pretended = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"Pretended({self.inner})"


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """How often, by operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _run(func, args, kwargs or {})
        here = any(isinstance(one, Pretended) for one in tree_leaves((args, kwargs)))
        if here and (func is aten.nonzero.default or not isinstance(found, Pretended | tuple | list)):
            self.waits[str(func)] += 1
        return found


@contextmanager
def pretending() -> Iterator[Counter[str]]:
    """Within the block the device is there, without gradients; gives how often its numbers are waited for."""
    mode = _Mode()
    usual = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with torch.inference_mode(), mode:
            yield mode.waits
    finally:
        torch._C._set_only_lift_cpu_tensors(usual)


def move_to_device(policy: Any) -> Any:
    """The policy, with all that its model holds on the pretended device."""
    there: dict[torch.Tensor, torch.Tensor] = {}
    for module in policy.model.modules():
        for name, held in module._parameters.items():
            if held is not None:
                made = torch.nn.Parameter(Pretended(held.detach()), requires_grad=held.requires_grad)
                module._parameters[name] = there.setdefault(held, made)
        for name, held in module._buffers.items():
            if held is not None:
                module._buffers[name] = Pretended(held)
    policy.device = DEVICE
    return policy


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    here = any(isinstance(one, Pretended) for one in tensors)
    others = [one for one in tensors if not isinstance(one, Pretended) and one.dim() > 0]
    if here and others and func not in _MAY_MIX:
        raise MixedDevices(f"{func} of tensors of {[tuple(one.shape) for one in others]} on the CPU")
    if here and (func.namespace == "mkldnn" or "for_cpu" in str(func)):
        raise MixedDevices(f"{func} is the CPU's alone")
    if func is aten._fused_sdp_choice.default:
        return 0  # What the definition does is what both devices have.
    devices = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.device)]
    goes = devices[0].type == DEVICE.type if devices else here
    plain = tree_map_only(Pretended, lambda one: one.inner, (args, kwargs))
    plain = tree_map_only(torch.device, lambda one: torch.device("cpu"), plain)
    found = func(*plain[0], **plain[1])
    if func is aten.copy_.default or not goes:
        return args[0] if func is aten.copy_.default else found
    if func._schema.is_mutable:
        return kwargs.get("out", args[0])
    return tree_map_only(torch.Tensor, Pretended, found)
