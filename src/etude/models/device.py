"""Where a model runs."""

from __future__ import annotations

import os

import torch

from etude.core.errors import RequestError


def choose_device(wish: str = "auto") -> torch.device:
    """The device for `auto`, `cpu`, `cuda`, `cuda:1`, `mps`: the best there is, or the one wished for.

    Raises RequestError when the wished-for device is not there.
    """
    if wish == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wish)
    except RuntimeError as error:
        raise RequestError(f"device '{wish}' is not known; use auto, cpu, cuda, cuda:N or mps") from error
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not usable.get(device.type, False):
        raise RequestError(f"device '{wish}' is not available on this machine; use device: auto or cpu")
    return device


def choose_dtype(wish: str, device: torch.device, parameters: int) -> torch.dtype:
    """The type of a model's weights: `auto` is bfloat16 on CUDA, and on CPUs that multiply it for a model of
    10 million parameters or more. Elsewhere it is float32: bfloat16 is slower there and less exact.

    Raises RequestError for a type that is not known.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if wish == "auto":
        is_faster = device.type == "cpu" and is_large(parameters) and multiplies_bfloat16()
        return torch.bfloat16 if device.type == "cuda" or is_faster else torch.float32
    if wish not in known:
        raise RequestError(f"dtype '{wish}' is not known; use auto, {', '.join(known)}")
    return known[wish]


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of plain memory on a device, without a wait for what CUDA was asked for before.

    CUDA takes the numbers of memory that is not pinned before the call is over; Metal may do so later.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `choose_dtype` knows a type by."""
    return str(dtype).removeprefix("torch.")


def is_large(parameters: int) -> bool:
    """Whether a CPU spends its time on what a model computes, and not on calls.

    It is faster then in bfloat16, where it has that, and with all of its cores.
    """
    return parameters >= 10_000_000


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it (AVX512-BF16 or AMX), and so is faster than in float32."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # Since torch 2.11.
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def limit_threads(parameters: int = 0) -> None:
    """Let torch use one core, or all for a large model, unless the user's environment says otherwise.

    Small models lose more to OpenMP's busy waiting than a second thread gives, and with a busy
    neighbour they lose all of it. A fixed count also makes sums come out the same every time.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores() if is_large(parameters) else 1)
