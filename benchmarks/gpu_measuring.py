"""Time and memory on a GPU, where work is only asked for until somebody waits; and on a CPU, for a look."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from learner import peak_mb

Step = Callable[[], Any]


def wait(device: torch.device) -> None:
    """Until all that was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Step, device: torch.device) -> float:
    """Of one step."""
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def median_seconds(steps: dict[str, Step], repeats: int, device: torch.device) -> dict[str, float]:
    """Medians of steps that take turns, and have been warmed up."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            found[name].append(seconds(step, device))
    return {name: statistics.median(values) for name, values in found.items()}


def fastest(candidates: dict[str, Step], device: torch.device) -> tuple[str, Step] | None:
    """The one that takes the least, by the better of two tries after a first; None where all lack memory."""
    found: list[tuple[float, str, Step]] = []
    for name, step in candidates.items():
        # Not where memory is lacking: the error still holds what the step had made.
        torch.cuda.empty_cache()
        try:
            step()
            found.append((min(seconds(step, device) for _ in range(2)), name, step))
        except torch.OutOfMemoryError:
            continue
    if not found:
        return None
    _, name, step = min(found, key=lambda one: one[0])
    return name, step


def peak_megabytes(step: Step, device: torch.device) -> float:
    """The most memory that torch held during a step, beyond what it held before."""
    if device.type != "cuda":
        return peak_mb(step)
    wait(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def matrix_rate(size: int, device: torch.device) -> float:
    """Multiplications and additions a second of a product of two random matrices in bfloat16."""
    made = torch.Generator(device).manual_seed(0)
    one, other = (torch.randn(size, size, device=device, generator=made).to(torch.bfloat16) for _ in range(2))
    for _ in range(3):
        one @ other
    found = statistics.median(seconds(lambda: [one @ other for _ in range(10)], device) for _ in range(5))
    return 10 * 2 * size**3 / found


def copy_rate(size: int, device: torch.device) -> float:
    """Bytes read and written a second by a copy within the device, of eight matrices in float32."""
    here = torch.randn(8 * size * size, device=device)
    there = torch.empty_like(here)
    there.copy_(here)
    found = statistics.median(seconds(lambda: there.copy_(here), device) for _ in range(5))
    return 2 * here.numel() * here.itemsize / found


def top_kernels(step: Step, device: torch.device, count: int = 20) -> list[dict[str, Any]]:
    """Shares of a step's time on the device (on a CPU, of its time on that), the largest first."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # The engine's thread is another than this one.
    threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=kinds, experimental_config=threads) as profiler:
        step()
        wait(device)
    events = [
        (one.self_device_time_total if on_gpu else one.self_cpu_time_total, one.count, one.key)
        for one in profiler.key_averages()
        # What was asked for on the CPU has the time of its kernels too.
        if not on_gpu or one.device_type == torch.autograd.DeviceType.CUDA
    ]
    whole = sum(time for time, _, _ in events) or 1.0
    return [
        {"kernel": name[:120], "ms": round(time / 1000, 3), "share": round(time / whole, 4), "calls": calls}
        for time, calls, name in sorted(events, reverse=True)[:count]
    ]
