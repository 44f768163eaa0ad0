"""The machine's disk and cores, the size of models, and how fast they run: rough numbers, for estimates."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STEP_SECONDS_PER_LAYER = {"cpu": 2.5e-3, "mps": 1e-3, "cuda": 4e-4}
"""Time of each layer at each sampling step, however small the model is; measured on the tiny ones."""

_BYTES_PER_SECOND = {"cpu": 1e10, "mps": 1e11, "cuda": 1e12}
"""How fast weights are read: the bound for a small batch."""

_EFFICIENCY = 0.35
"""Share of a large matrix product's speed that a whole model reaches."""

_PROBE_SECONDS, _PROBES = 0.1, 5
"""How long it is tried how fast matrices are multiplied, and how often at least."""


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


def seconds_for(size: ModelSize, *, prompt: float, sampled: float, trained: float, batch: int) -> float:
    """Seconds of wall time for so many tokens, with `batch` sequences sampled at once.

    2 operations per parameter and token to run, 6 to train.
    """
    speed = _operations_per_second(size) * _EFFICIENCY
    step = size.layers * _STEP_SECONDS_PER_LAYER[size.device] + max(
        2 * size.parameters * batch / speed,
        size.parameters * size.bytes_per_parameter / _BYTES_PER_SECOND[size.device],
    )
    return sampled / batch * step + (2 * prompt + 6 * trained) * size.parameters / speed


def _operations_per_second(size: ModelSize) -> float:
    """Of a matrix product on this machine as it is now, in the model's type and with as many threads."""
    import torch

    from etude.models.device import limit_threads

    limit_threads(size.parameters)
    side = 2048 if size.device == "cuda" else 512
    # In half precision CPUs without such instructions are hopeless, and nothing is known of four bits.
    is_half = size.device == "cpu" and size.bytes_per_parameter == torch.bfloat16.itemsize
    dtype = torch.bfloat16 if is_half else torch.float32
    matrix = torch.ones(side, side, device=size.device, dtype=dtype)
    seconds: list[float] = []
    until = time.perf_counter() + _PROBE_SECONDS
    # torch's own Timer imports a compiler's machinery, and takes three times as long over it.
    while len(seconds) < _PROBES or time.perf_counter() < until:
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # Which waits for a GPU.
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 / statistics.median(seconds)


def existing_folder(path: Path) -> Path:
    """`path`, or the nearest of the folders around it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def free_disk(path: Path) -> int:
    """Free bytes where `path` is, or would be."""
    return shutil.disk_usage(existing_folder(path)).free
