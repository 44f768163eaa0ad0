"""CUDA kernels that torch compiles: for chains of operations, and for attention over token trees.

Separate operations of a chain would each go through all of the memory. FlexAttention's kernels skip blocks
without any score. It is called directly: `transformers` repeats keys for some numbers of heads. After eight
compilations, `transformers` also falls back silently to computing all scores at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from subprocess import SubprocessError
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.core.errors import first_line

_LOG = logging.getLogger("etude.learner")

_FAULTS = RuntimeError, AssertionError, OSError, ImportError, SubprocessError
"""Errors of compilers that do not work here."""
_LEAST = 1 << 22
"""Minimum size of a function's input to compile it: smaller ones take less time than compiling."""
_COMPILATIONS = 64
"""Maximum number of compilations per function, over all models of a process. They differ by size (one, then
any), kind of model, kind of mask, gradient and optional arguments."""

P = ParamSpec("P")
T = TypeVar("T")


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, compiled on CUDA for any number of rows, its tensors' first dimension."""
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
    """Return whether operations on `x` become a kernel; this includes sums, but no products or scatters."""
    return x.is_cuda


@cache
def _compiles(device: torch.device) -> bool:
    """Return whether torch can compile for the device, by trying it."""
    try:
        torch.compile(lambda x: (x.exp() + 1).sum(), fullgraph=True)(torch.ones(2, device=device))
    except _FAULTS as error:
        _LOG.warning("training takes longer, as torch compiles nothing here: %s", first_line(error))
        return False
    return True


BLOCK = 128
"""Number of tokens in a block."""
_FEWEST = 2
"""Minimum number of blocks in a tree: a single one would need its own compilation."""
_NARROWEST = 16
"""Minimum width of a head that the kernels can multiply."""
_PAIRS = 1 << 24
"""Maximum number of token pairs to compare at a time for a mask."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores follow from queries and keys, except for which tokens attend to which."""

    scale: float
    softcap: float | None = None
    window: int | None = None


def padded_size(size: int) -> int:
    """Return the number of tokens that a tree of `size` tokens is padded to."""
    return max(_FEWEST, -(-size // BLOCK)) * BLOCK


def block_mask(ends_N: Tensor, depths_N: Tensor, window: int | None) -> Any:
    """Return the blocks of a tree in which some tokens attend to others, and in which all do.

    It equals the mask of `create_block_mask`, which needs a compilation per size or all token pairs at once.
    """
    from torch.nn.attention.flex_attention import BlockMask

    attends = _attends(ends_N.int(), depths_N.int(), window)
    size = len(ends_N)
    indices = torch.arange(size, device=ends_N.device, dtype=torch.int32)
    counts = [
        attends(None, None, rows[:, :, None], indices).view(-1, BLOCK, size // BLOCK, BLOCK).sum(dim=(1, 3))
        for rows in torch.split(indices.view(-1, BLOCK), max(1, _PAIRS // (BLOCK * size)))
    ]
    counts_QK = torch.cat(counts)
    whole_QK = counts_QK == BLOCK * BLOCK
    parts, wholes = _list_blocks((counts_QK > 0) & ~whole_QK), _list_blocks(whole_QK)
    return BlockMask.from_kv_blocks(*parts, *wholes, BLOCK_SIZE=BLOCK, mask_mod=attends)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, scores: Scores, compiled: bool) -> Tensor:
    """Attend with queries [1, H, N, D] to keys [1, G, N, D] and values [1, G, N, W]; return [1, H, N, W].

    `mask` is the block mask for the window of `scores`. Without `compiled`, all scores are in memory at once,
    for tests. Raises ValueError if the compiled kernels do not run.
    """
    width = value.shape[-1]
    query, key, value = (F.pad(x, (0, max(0, _NARROWEST - x.shape[-1]))) for x in (query, key, value))
    if compiled:
        shape = query.shape[1], key.shape[1], query.shape[-1]
        reason = _why_not(query.device, query.dtype, shape, scores)
        if reason is not None:
            raise ValueError(reason)
    return _call(query, key, value, mask, scores, compiled)[..., :width]


def _call(query: Tensor, key: Tensor, value: Tensor, mask: Any, scores: Scores, compiled: bool) -> Tensor:
    cap = None if scores.softcap is None else _cap(scores.softcap)
    run = _compile_flex() if compiled else _flex
    # Otherwise a second model's scale or softcap would become a variable, which the kernels do not accept.
    with torch._dynamo.config.patch(recompile_limit=_COMPILATIONS, specialize_float=True):
        out: Tensor = run(query, key, value, mask, scores.scale, cap)
    return out


def _flex(query: Any, key: Any, value: Any, mask: Any, scale: float, cap: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    several = query.shape[1] != key.shape[1]
    return flex_attention(query, key, value, cap, mask, scale, enable_gqa=several)


@cache
def _compile_flex() -> Any:
    # Uncompiled, it would take memory for all pairs of tokens: an error is better.
    return torch.compile(_flex, fullgraph=True)


@cache
def _why_not(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], scores: Scores
) -> str | None:
    """Return why the kernels, forward and backward, do not run for such a model, by trying; None if they do.

    All other sizes use the compilation for the second size. `shape` has the heads' H, G and D.
    """
    heads, groups, width = shape
    try:
        for size in (padded_size(0), padded_size(0) + BLOCK):
            query, key, value = (
                torch.randn(1, count, size, width, device=device, dtype=dtype, requires_grad=True)
                for count in (heads, groups, groups)
            )
            ends, depths = torch.full((size,), size, device=device), torch.arange(size, device=device)
            with torch.enable_grad():
                out = _call(query, key, value, block_mask(ends, depths, scores.window), scores, True)
                torch.autograd.grad(out.sum(), (query, key, value))
    except torch.OutOfMemoryError:
        raise
    except (*_FAULTS, ValueError, TypeError) as error:
        first: BaseException = error
        while (before := first.__cause__ or first.__context__) is not None:
            first = before  # Compilers wrap the original error.
        lines = str(first).strip().splitlines() or [""]
        return f"FlexAttention does not run here: {type(first).__name__}: {lines[0]}"
    return None


def _attends(
    ends_N: Tensor, depths_N: Tensor, window: int | None
) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
    """Return a function that tells whether queries attend to keys, for any sequence and head. It uses only
    tensors, because the compiler requires that."""
    if window is None:
        return lambda batch, head, query, key: (key <= query) & (query < ends_N[key])
    # A Python number would need another compilation.
    floors_N = depths_N - window
    return lambda batch, head, query, key: (
        (key <= query) & (query < ends_N[key]) & (depths_N[key] > floors_N[query])
    )


def _cap(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _list_blocks(blocks_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's number of blocks, and their indices; entries after these do not matter."""
    which = torch.argsort(blocks_QK.int(), dim=-1, descending=True, stable=True)
    return blocks_QK.sum(dim=-1).int()[None, None], which.int()[None, None]
