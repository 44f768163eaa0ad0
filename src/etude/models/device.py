"""The device, memory, data type and threads that a model runs with."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from etude.core.errors import RequestError

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


def choose_device(wish: str = "auto") -> torch.device:
    """Return the device for `auto` (the best available), `cpu`, `cuda`, `cuda:1` or `mps`.

    Raises RequestError if the requested device is not available.
    """
    import torch

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
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if wish == "auto":
        # Since torch 2.11. An Intel Xeon with AVX512-BF16 but without AMX takes 1.7 times as long as float32.
        has: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        is_able = has.get("amx_bf16") or (has.get("avx512_bf16") and "AMD" in str(has.get("cpu_name")))
        is_faster = device.type == "cpu" and is_large(parameters) and bool(is_able)
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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def dtype_name(dtype: torch.dtype) -> str:
    """Return the type's name, as `choose_dtype` accepts it."""
    return str(dtype).removeprefix("torch.")


def is_large(parameters: int) -> bool:
    """Return whether computation, and not call overhead, dominates its time on a CPU. Such models run
    faster with all cores, and with bfloat16 if the CPU multiplies it faster."""
    return parameters >= 10_000_000


def limit_threads(parameters: int = 0) -> None:
    """Let torch use one core, or all cores for a large model, unless `OMP_NUM_THREADS` is set.

    Small models lose more to OpenMP's busy waiting than a second thread gains, and on a busy machine they
    lose all of it. A fixed count also makes the results of sums repeat exactly.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(usable_cores() if is_large(parameters) else 1)


def available_memory(device: str = "cpu") -> int | None:
    """Return the free memory of a device, such as `cuda:1`, in bytes; None if it is unknown.

    GPU memory that torch has reserved and does not use counts as free.
    """
    if device.startswith("cuda"):
        import torch

        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    rooms = list[int]()
    with suppress(OSError, ValueError):  # Outside a container there is no file, or the limit is `max`.
        limit, used = (int((_CGROUP / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
        rooms.append(max(0, limit - used))
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        rooms += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(rooms, default=None)


def release_freed_memory() -> None:
    """Make the C library return freed memory to the system, which glibc otherwise keeps for each thread."""
    with suppress(AttributeError, OSError, TypeError):  # Other libraries have no such function.
        ctypes.CDLL(None).malloc_trim(0)


def release_threads() -> None:
    """End the threads that OpenMP keeps for the calling thread; its next operation starts new ones.

    OpenMP keeps some for each thread that has computed. If a process has more of them than cores, they sleep
    after every operation: a training step then took a fifth longer on two cores.
    """
    with suppress(AttributeError, OSError, TypeError):  # Not all of OpenMP's libraries have the function.
        ctypes.CDLL(None).omp_pause_resource_all(1)


def shown_bytes(count: float) -> str:
    """Format a number of bytes, in powers of 1000: `1.5 GB`."""
    return decimal(round(count))
