"""Float32 copies of half-precision weights: what the optimiser steps on.

(Micikevicius et al., 2018.) bfloat16 has eight bits of a number, so that a step of less than a 500th of a
weight would be lost by rounding, and with it all steps like it. Each number trained in half precision takes
18 bytes: the weight (2), its master (4), the gradient (4) and AdamW's moments (8). In float32 it is 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Parameter

from etude.models.weights import part_like


class Masters:
    """For each trained parameter what the optimiser steps on; a float32 parameter is its own master.

    Parameters may be shards: so are their masters.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.by_name = {name: _master(parameter) for name, parameter in parameters.items()}
        """The masters, by their parameters' names."""
        self._pairs = {
            name: (parameter, self.by_name[name])
            for name, parameter in parameters.items()
            if self.by_name[name] is not parameter
        }

    def copies(self) -> dict[str, torch.Tensor]:
        """The masters that are not the parameters themselves: what a checkpoint needs beside the weights."""
        return {name: master.detach() for name, (_, master) in self._pairs.items()}

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within the block, what backward passes add to parameters is summed up in float32 instead."""
        pairs: Iterable[tuple[Any, Parameter]] = self._pairs.values()
        hooks = [
            parameter.register_post_accumulate_grad_hook(_handing_over(master)) for parameter, master in pairs
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters to the parameters."""
        for parameter, master in self._pairs.values():
            parameter.copy_(master)

    @torch.no_grad()
    def read(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Take up what `copies` gave once, where it goes with the weights; else the weights themselves.

        So a checkpoint of a float32 training, which has none, can be gone on from too.
        """
        for name, (parameter, master) in self._pairs.items():
            master.copy_(part_like(copies[name], master) if name in copies else parameter)
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Take over the weights, if others have put some there that the masters do not round to."""
        pairs = self._pairs.values()
        if not all(
            torch.equal(_local(parameter), _local(master).to(parameter.dtype)) for parameter, master in pairs
        ):
            for parameter, master in pairs:
                master.copy_(parameter)


def _master(parameter: Parameter) -> Parameter:
    half = parameter.dtype in (torch.bfloat16, torch.float16)
    return Parameter(parameter.detach().float()) if half else parameter


def _handing_over(master: Parameter) -> Any:
    def hand_over(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hand_over


def _local(tensor: Any) -> torch.Tensor:
    """The part that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]
