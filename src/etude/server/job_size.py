"""The size of a job, as far as it is known before it runs: one that cannot be done is refused."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Any

import torch

from etude.learner.memory import ModelNumbers, TrainingMemory, fits
from etude.models.device import choose_device, choose_dtype
from etude.models.memory import available_memory, shown_bytes, total_memory
from etude.models.policy import LoraOptions
from etude.preflight.local_model import outline
from etude.server.settings import ServerSettings
from etude.wire.http_server import ApiError

_MOST_STEPS = 1_000_000


def require_doable(settings: ServerSettings, values: Mapping[str, Any], *, rows: int, place: str) -> None:
    """Raise ApiError for a job whose rank, steps or memory are beyond what the model and this machine have.

    `values` are all of its hyperparameters, `place` is where a request has them. Where the memory is not this
    machine's, or nobody says how much there is, it is not looked at; nor are activations, which depend on the
    data: the job itself sees to them before its first step.
    """
    numbers, rank = _numbers(settings.model, 0), values["lora_rank"]
    if rank > numbers.width:
        message = f"lora_rank is {rank}, and the model's width {numbers.width}: a higher rank adds nothing"
        raise ApiError(400, message, param=f"{place}.lora_rank", code="invalid_value")
    steps = values["n_epochs"] * ceil(rows / max(1, values["batch_size"]))
    if steps > _MOST_STEPS:
        message = f"the job has {steps} steps, and at most {_MOST_STEPS} are taken; lower n_epochs"
        raise ApiError(400, message, param=f"{place}.n_epochs", code="invalid_value")
    device = choose_device(settings.device)
    there, needed = _memory_of(device, settings), memory_of_job(settings, values)
    if there is not None and not fits(needed.total, there):
        message = (
            f"the job takes {needed} of memory without its activations, and this machine's {device.type} has "
            f"{shown_bytes(there)}; train LoRA weights of a lower rank"
        )
        raise ApiError(400, message, param=place, code="insufficient_memory")


def require_room(settings: ServerSettings, values: Mapping[str, Any]) -> None:
    """Raise ApiError when there is not enough memory free, in the process that is about to load the model.

    On a cluster it is that of the node.
    """
    device = choose_device(settings.device)
    free, needed = available_memory(str(device)), memory_of_job(settings, values)
    if free is not None and not fits(needed.total, free):
        message = (
            f"the job takes {needed} of memory without its activations, and {shown_bytes(free)} are free on "
            f"{device} of {platform.node()}; free some (--stop-engine-for-jobs), or train with less"
        )
        raise ApiError(503, message, code="insufficient_memory")


def memory_of_job(settings: ServerSettings, values: Mapping[str, Any]) -> TrainingMemory:
    """The memory of one process of a job with these hyperparameters, without activations.

    Those of several processes that share out the weights each have a part of them.
    """
    device, rank = choose_device(settings.device), values["lora_rank"]
    base, lora_1 = _numbers(settings.model, 0), _numbers(settings.model, 1).trained
    size = choose_dtype(settings.dtype, device, base.trained).itemsize
    numbers = replace(base, weights=base.trained * size, size=size)
    if rank:
        numbers = replace(numbers, trained=rank * lora_1, is_lora=True)
    parts = (settings.training_processes or 1) if settings.shard_training else 1
    return numbers.training(on_gpu=device.type == "cuda", parts=parts)


@lru_cache(maxsize=8)
def _numbers(source: str, rank: int) -> ModelNumbers:
    """The numbers of a model from its config alone, with LoRA weights of a rank or without."""
    policy = outline(source)
    if rank:
        policy.use_lora(LoraOptions(rank, 1.0), seed=0)
    return ModelNumbers.of(policy)


def _memory_of(device: torch.device, settings: ServerSettings) -> int | None:
    """Bytes of memory that the device of jobs has in all; None where that is not known here."""
    if settings.cluster is not None:
        return None
    if device.type == "cuda" and settings.engine == "embedded":
        # To ask a GPU that this process did not use would take some of its memory.
        return torch.cuda.get_device_properties(device).total_memory
    return total_memory() if device.type == "cpu" else None
