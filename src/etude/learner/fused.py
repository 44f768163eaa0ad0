"""Chains of operations on elements and rows, each of which becomes a kernel or two on CUDA.

One by one they would each go through all of the memory. On a CPU they run as they stand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from subprocess import SubprocessError
from typing import Any, ParamSpec, TypeVar

import torch

_LOG = logging.getLogger("etude.learner")

_LEAST = 1 << 22
"""Numbers that a function is given at least where it is compiled: fewer take less time than to compile."""
_COMPILATIONS = 64
"""Of a function at most: for each kind of model, with and without what may be left out."""

P = ParamSpec("P")
T = TypeVar("T")


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """The function, on CUDA compiled for any number of rows, which are the first dimension of its tensors."""
    compiled = cache(lambda: torch.compile(function, fullgraph=True))

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        first = tensors[0]
        if not is_kernel(first) or first.numel() < _LEAST or not _compiles(first.device):
            return function(*args, **kwargs)
        for tensor in tensors:
            if tensor.dim() and len(tensor) == len(first):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with torch._dynamo.config.patch(recompile_limit=_COMPILATIONS):
            found: T = compiled()(*args, **kwargs)
        return found

    return run


def is_kernel(x: torch.Tensor) -> bool:
    """Whether operations on `x` become a kernel: sums are a part of it, products and scatters are not."""
    return x.is_cuda


@cache
def _compiles(device: torch.device) -> bool:
    """Whether torch can compile for the device. It is tried."""
    try:
        _tried()(torch.ones(2, device=device))
    except (RuntimeError, AssertionError, OSError, ImportError, SubprocessError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _LOG.warning("training takes longer, as torch compiles nothing here: %s", reason)
        return False
    return True


def _tried() -> Callable[[torch.Tensor], Any]:
    return torch.compile(lambda x: (x.exp() + 1).sum(), fullgraph=True)
