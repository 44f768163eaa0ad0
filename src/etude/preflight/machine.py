"""What the machine has: memory, disk, cores, devices."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def available_memory(device: str = "cpu") -> int | None:
    """Free memory of a kind of device in bytes; None where nobody says."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    limits = [found for found in (_meminfo("MemAvailable"), _cgroup_room()) if found is not None]
    return min(limits, default=None)


def total_memory() -> int | None:
    """Memory of the machine in bytes; None where nobody says."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def free_disk(path: Path) -> int:
    """Free bytes where `path` is, or would be."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def _cgroup_room() -> int | None:
    """What a container still allows."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used) if limit.isdigit() else None
