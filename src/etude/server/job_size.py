"""The size of a job, as far as it is known before it runs: one that cannot be done is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import torch

from etude.learner.learner import LearnerOptions
from etude.models.architecture import text_config
from etude.models.device import choose_device, choose_dtype
from etude.models.policy import LoraOptions
from etude.preflight.local_model import outline
from etude.preflight.machine import available_memory, shown_bytes, total_memory
from etude.server.settings import ServerSettings
from etude.wire.api_error import ApiError

_MOST_STEPS = 1_000_000
_KEPT_BY_A_LAYER = {"all": 16, "lora": 8, "checkpointed": 2}
"""Bytes of activations in 16 bits for each token and unit of the model's width: at least. Korthikanti et al.
(2022) have 34 for a layer that keeps everything; fused kernels and frozen weights keep less."""
_MOMENTS, _MASTER = 8, 4
"""Bytes of AdamW's two moments, and of a float32 copy beside a weight in 16 bits."""


@dataclass(frozen=True, slots=True)
class JobMemory:
    """Bytes that a job takes at the least."""

    weights: int
    training: int
    """Gradients and the optimiser's state."""
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.training + self.activations

    def __str__(self) -> str:
        return (
            f"{shown_bytes(self.total)} ({shown_bytes(self.weights)} of weights, "
            f"{shown_bytes(self.training)} of gradients and optimiser, "
            f"{shown_bytes(self.activations)} of activations)"
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    parameters: int
    lora_parameters: int
    """Of LoRA weights of rank 1."""
    width: int
    layers: int


def require_doable(
    settings: ServerSettings, values: Mapping[str, Any], *, rows: int, file_bytes: int, place: str
) -> None:
    """Raise ApiError for a job whose rank, steps or memory are beyond what the model and this machine have.

    `values` are all of its hyperparameters, `place` is where a request has them. Where the memory is not this
    machine's, or nobody says how much there is, it is not looked at.
    """
    shape, rank = _shape(settings.model), values["lora_rank"]
    if rank > shape.width:
        message = f"lora_rank is {rank}, and the model's width {shape.width}: a higher rank adds nothing"
        raise ApiError(400, message, param=f"{place}.lora_rank", code="invalid_value")
    steps = values["n_epochs"] * ceil(rows / max(1, values["batch_size"]))
    if steps > _MOST_STEPS:
        message = f"the job has {steps} steps, and at most {_MOST_STEPS} are taken; lower n_epochs"
        raise ApiError(400, message, param=f"{place}.n_epochs", code="invalid_value")
    device = choose_device(settings.device)
    there = _memory_of(device, settings)
    needed = memory_of_job(settings, values, file_bytes)
    if there is not None and needed.total > there:
        message = (
            f"the job takes at least {needed} of memory, and this machine's {device.type} has "
            f"{shown_bytes(there)}; train LoRA weights of a lower rank, or with gradient_checkpointing"
        )
        raise ApiError(400, message, param=place, code="insufficient_memory")


def require_room(settings: ServerSettings, values: Mapping[str, Any], file_bytes: int) -> None:
    """Raise ApiError when there is not enough memory free, in the process that is about to train the job."""
    device = choose_device(settings.device)
    free, needed = available_memory(device.type), memory_of_job(settings, values, file_bytes)
    if free is not None and needed.total > free:
        message = (
            f"the job takes at least {needed} of memory, and {shown_bytes(free)} are free on {device.type}; "
            "free some (--stop-engine-for-jobs), or train with less"
        )
        raise ApiError(503, message, code="insufficient_memory")


def memory_of_job(settings: ServerSettings, values: Mapping[str, Any], file_bytes: int) -> JobMemory:
    """The memory of one process of a job with these hyperparameters and a file of so many bytes.

    Those of several processes that share out the weights each have a part of them.
    """
    shape, rank = _shape(settings.model), values["lora_rank"]
    size = choose_dtype(settings.dtype, choose_device(settings.device)).itemsize
    trained = rank * shape.lora_parameters if rank else shape.parameters
    parts = (settings.training_processes or 1) if settings.shard_training else 1
    # A token is at least a byte of the file.
    tokens = min(LearnerOptions().token_budget, file_bytes)
    kept = "checkpointed" if values["gradient_checkpointing"] else "lora" if rank else "all"
    return JobMemory(
        weights=shape.parameters * size // parts,
        training=trained * (size + _MOMENTS + (_MASTER if size < _MASTER else 0)) // parts,
        activations=tokens * shape.width * shape.layers * _KEPT_BY_A_LAYER[kept] * size // 2,
    )


@lru_cache(maxsize=4)
def _shape(source: str) -> _Shape:
    """The numbers of a model, from its config alone."""
    policy = outline(source)
    config = text_config(policy.model)
    parameters = sum(value.numel() for value in policy.model.parameters())
    policy.use_lora(LoraOptions(1, 1.0), seed=0)
    lora = sum(value.numel() for value in policy.trainable().values())
    return _Shape(parameters, lora, int(config.hidden_size), int(config.num_hidden_layers))


def _memory_of(device: torch.device, settings: ServerSettings) -> int | None:
    """Bytes of memory that the device of jobs has in all; None where that is not known here."""
    if settings.cluster is not None:
        return None
    if device.type == "cuda" and settings.engine == "embedded":
        # To ask a GPU that this process did not use would take some of its memory.
        return torch.cuda.get_device_properties(device).total_memory
    return total_memory() if device.type == "cpu" else None
