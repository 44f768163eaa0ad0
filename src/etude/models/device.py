"""The device, data type and threads that a model runs with."""

from __future__ import annotations

import os

import torch

from etude.core.errors import RequestError


def choose_device(wish: str = "auto") -> torch.device:
    """Return the device for `auto` (the best available), `cpu`, `cuda`, `cuda:1` or `mps`.

    Raises RequestError if the requested device is not available.
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
    """Return the type of a model's weights. `auto` is bfloat16 on CUDA, and for models of at least 10 million
    parameters on CPUs that multiply bfloat16 faster. Elsewhere it is float32, which is more exact.

    Raises RequestError for an unknown type.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if wish == "auto":
        is_faster = device.type == "cpu" and is_large(parameters) and multiplies_bfloat16_faster()
        return torch.bfloat16 if device.type == "cuda" or is_faster else torch.float32
    if wish not in known:
        raise RequestError(f"dtype '{wish}' is not known; use auto, {', '.join(known)}")
    return known[wish]


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from ordinary memory to a device, without waiting for CUDA's queued work.

    CUDA reads unpinned memory before the call returns; Metal may read it later, so there the copy waits.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def dtype_name(dtype: torch.dtype) -> str:
    """Return the type's name, as `choose_dtype` accepts it."""
    return str(dtype).removeprefix("torch.")


def is_large(parameters: int) -> bool:
    """Return whether computation, and not call overhead, dominates its time on a CPU. Such models run
    faster with all cores, and with bfloat16 if the CPU multiplies it faster."""
    return parameters >= 10_000_000


def multiplies_bfloat16_faster() -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32: with AMX, or AVX512-BF16 of AMD. An
    Intel Xeon with AVX512-BF16 but without AMX took 1.7 times as long for 1,024 rows of 576 numbers."""
    has: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # Since torch 2.11.
    return bool(has.get("amx_bf16") or (has.get("avx512_bf16") and "AMD" in str(has.get("cpu_name"))))


def limit_threads(parameters: int = 0) -> None:
    """Let torch use one core, or all cores for a large model, unless `OMP_NUM_THREADS` is set.

    Small models lose more to OpenMP's busy waiting than a second thread gains, and on a busy machine they
    lose all of it. A fixed count also makes the results of sums repeat exactly.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores() if is_large(parameters) else 1)
