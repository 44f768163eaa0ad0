"""The total and free memory of the machine, a container or a GPU."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal

_CGROUP = Path("/sys/fs/cgroup")


def available_memory(device: str = "cpu") -> int | None:
    """Return the free memory of a device, such as `cuda:1`, in bytes; None if it is unknown.

    GPU memory that torch has reserved and does not use counts as free.
    """
    if device.startswith("cuda"):
        import torch

        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    rooms = [] if limit is None or used is None else [max(0, limit - used)]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        rooms += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(rooms, default=None)


def total_memory() -> int | None:
    """Return the memory of the machine, or of this process's container, in bytes; None if unknown."""
    try:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _cgroup_number("memory.max")
    return min(pages, _cgroup_number("memory.max") or pages)


def release_freed_memory() -> None:
    """Make the C library return freed memory to the system, which glibc otherwise keeps for each thread."""
    with suppress(AttributeError, OSError, TypeError):  # Other libraries have no such function.
        ctypes.CDLL(None).malloc_trim(0)


def shown_bytes(count: float) -> str:
    """Format a number of bytes, in powers of 1000: `1.5 GB`."""
    return decimal(round(count))


def _cgroup_number(name: str) -> int | None:
    """Read a number from a file of this process's cgroup; None outside a container or without a number."""
    try:
        text = (_CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
