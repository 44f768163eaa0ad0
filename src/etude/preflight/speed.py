"""How long a model takes on this machine: a rough model of its cost, with one measured number."""

from __future__ import annotations

import time
from dataclasses import dataclass

from etude.preflight.sizes import ModelSize

_STEP_SECONDS_PER_LAYER = {"cpu": 2.5e-3, "mps": 1e-3, "cuda": 4e-4}
"""What each layer costs at each sampling step however small the model is; measured on the tiny ones."""

_BYTES_PER_SECOND = {"cpu": 1e10, "mps": 1e11, "cuda": 1e12}
"""How fast weights are read: the bound for a small batch."""

_EFFICIENCY = 0.35
"""Share of a large matrix product's speed that a whole model reaches."""

_PROBE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done."""

    prompt_tokens: float
    sampled_tokens: float
    trained_tokens: float
    batch: int
    """Sequences that are sampled at once."""


def seconds_for(size: ModelSize, work: Work) -> float:
    """Seconds of wall time: 2 operations per parameter and token to run, 6 to train."""
    speed = _operations_per_second(size.device) * _EFFICIENCY
    steps = work.sampled_tokens / work.batch
    step = size.layers * _STEP_SECONDS_PER_LAYER[size.device]
    step += max(
        2 * size.parameters * work.batch / speed,
        size.parameters * size.bytes_per_parameter / _BYTES_PER_SECOND[size.device],
    )
    return (
        steps * step
        + 2 * size.parameters * work.prompt_tokens / speed
        + 6 * size.parameters * work.trained_tokens / speed
    )


def _operations_per_second(device: str) -> float:
    """Of a matrix product on this machine, as it is now."""
    import torch

    from etude.models.device import limit_threads

    limit_threads()
    side = 2048 if device == "cuda" else 512
    matrix = torch.ones(side, side, device=device)
    (matrix @ matrix)[0, 0].item()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < _PROBE_SECONDS:
        (matrix @ matrix)[0, 0].item()
        count += 1
    return count * 2 * side**3 / (time.perf_counter() - started)
