"""Tensors on their way to a device that is not there."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from etude.models.device import sent


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.waiting.append(not kwargs.get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_cuda_is_not_waited_for():
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
        there = sent(torch.ones(3), torch.device("cuda", 0))
    assert there.device == torch.device("cuda", 0)
    assert copies.waiting == [False]


def test_a_tensor_that_is_there_stays_what_it_is():
    here = torch.ones(3)
    assert sent(here, torch.device("cpu")) is here
