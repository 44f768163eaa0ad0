"""The machine's memory and disk, the size of models, and how fast they run: rough numbers, for estimates."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STEP_SECONDS_PER_LAYER = {"cpu": 2.5e-3, "mps": 1e-3, "cuda": 4e-4}
"""Time of each layer at each sampling step, however small the model is; measured on the tiny ones."""

_BYTES_PER_SECOND = {"cpu": 1e10, "mps": 1e11, "cuda": 1e12}
"""How fast weights are read: the bound for a small batch."""

_EFFICIENCY = 0.35
"""Share of a large matrix product's speed that a whole model reaches."""

_PROBE_SECONDS = 0.1
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The properties of a model that decide how long it takes."""

    parameters: int
    trainable: int
    """Parameters that training changes."""
    layers: int
    bytes_per_parameter: float
    """Of the model as it is held."""
    device: str
    """`cpu`, `cuda` or `mps`."""
    prompt_tokens: float
    """Of an example's text as one user message, in the median; 0 when there is no text."""

    @property
    def memory(self) -> int:
        """Bytes that sampling and training take: the weights, and for what is trained the gradient, AdamW's
        two moments, a float32 master where weights are halves, and two copies to go back to. Activations are
        not counted."""
        half = self.bytes_per_parameter < 4
        extra = self.trainable * (2 * self.bytes_per_parameter + (16 if half else 12))
        return int(self.parameters * self.bytes_per_parameter + extra)

    @property
    def version(self) -> int:
        """Bytes that a stored version takes: the trained weights, their masters and AdamW's two moments."""
        half = self.bytes_per_parameter < 4
        return int(self.trainable * (self.bytes_per_parameter + (12 if half else 8)))


def together(sizes: Sequence[ModelSize]) -> ModelSize | None:
    """Several models as if they were one; None for none."""
    if not sizes:
        return None
    return ModelSize(
        parameters=sum(size.parameters for size in sizes),
        trainable=sum(size.trainable for size in sizes),
        layers=sum(size.layers for size in sizes),
        bytes_per_parameter=max(size.bytes_per_parameter for size in sizes),
        device=sizes[0].device,
        prompt_tokens=max(size.prompt_tokens for size in sizes),
    )


def shown_bytes(count: float) -> str:
    """`1.5 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def seconds_for(size: ModelSize, *, prompt: float, sampled: float, trained: float, batch: int) -> float:
    """Seconds of wall time for so many tokens, with `batch` sequences sampled at once.

    2 operations per parameter and token to run, 6 to train.
    """
    speed = _operations_per_second(size.device) * _EFFICIENCY
    step = size.layers * _STEP_SECONDS_PER_LAYER[size.device] + max(
        2 * size.parameters * batch / speed,
        size.parameters * size.bytes_per_parameter / _BYTES_PER_SECOND[size.device],
    )
    return sampled / batch * step + (2 * prompt + 6 * trained) * size.parameters / speed


def _operations_per_second(device: str) -> float:
    """Of a matrix product on this machine, as it is now."""
    import torch
    from torch.utils.benchmark import Timer

    from etude.models.device import limit_threads

    limit_threads()
    side = 2048 if device == "cuda" else 512
    matrix = torch.ones(side, side, device=device)
    timer = Timer(
        "(matrix @ matrix)[0, 0].item()", globals={"matrix": matrix}, num_threads=torch.get_num_threads()
    )
    seconds: float = timer.blocked_autorange(min_run_time=_PROBE_SECONDS).median
    return 2 * side**3 / seconds


def available_memory(device: str = "cpu") -> int | None:
    """Free memory of a kind of device in bytes; None where nobody says."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    limits = [limit for limit in (_unused_memory(), _cgroup_room()) if limit is not None]
    return min(limits, default=None)


def total_memory() -> int | None:
    """Memory of the machine, or of the container that this is, in bytes; None where nobody says."""
    try:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _cgroup_limit()
    return min(pages, _cgroup_limit() or pages)


def existing_folder(path: Path) -> Path:
    """`path`, or the nearest of the folders around it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def free_disk(path: Path) -> int:
    """Free bytes where `path` is, or would be."""
    return shutil.disk_usage(existing_folder(path)).free


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _unused_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if line is None else int(line.split()[1]) * 1024


def _cgroup_room() -> int | None:
    """Bytes that a container may still take; None outside of one."""
    limit = _cgroup_limit()
    try:
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit is None else max(0, limit - used)


def _cgroup_limit() -> int | None:
    """Bytes that a container may take in all; None outside of one."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(limit) if limit.isdigit() else None
