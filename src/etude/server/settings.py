"""The settings of a server and of its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr, ValidationError

from etude.core.errors import RequestError
from etude.processes.ray_cluster import RayConfig
from etude.show.logs import LogLevel
from etude.wire.http_server import is_loopback


class ServerSettings(BaseModel, frozen=True, extra="forbid"):
    """The settings of one server process."""

    model: str
    """A model folder, or a name on the Hugging Face hub."""
    name: str = Field(min_length=1)
    """The name that clients use for the base model."""
    data_dir: Path
    """The folder for files, jobs and fine-tuned models."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free port."""
    api_key: SecretStr | None = None
    engine: Literal["embedded", "vllm"] = "embedded"
    """The engine that samples: `embedded`, in this process, or `vllm`, a vLLM that the server runs."""
    vllm_command: str = "vllm"
    """The command that starts vLLM, as you would type it in a shell."""
    vllm_args: tuple[str, ...] = ()
    """More options for `vllm serve`."""
    vllm_devices: tuple[str, ...] = ()
    """The device of each vLLM process. If empty, one process uses all devices."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_batch: int = Field(default=256, ge=1)
    """The number of sequences that an engine samples at once."""
    max_tokens: int = Field(default=512, ge=1)
    """The token limit of a chat completion that sets none."""
    max_queue: int = Field(default=4096, ge=1)
    """The limit of running and waiting sequences. The server refuses more with 429."""
    max_models: int = Field(default=3, ge=1)
    """The number of models in memory at once."""
    max_file: int = Field(default=512 * 2**20, ge=1024)
    """The limit of an uploaded file's size in bytes."""
    running_jobs: int = Field(default=1, ge=1)
    """The number of jobs that train at once."""
    training_processes: int | None = Field(default=None, ge=1)
    """The number of processes that train a job together. None starts one per GPU."""
    algorithms: tuple[str, ...] = ()
    """Import paths `module:Name` of custom algorithms that jobs may name. The server imports them."""
    shard_training: bool = False
    """Give each training process only a part of the weights and of the optimiser state."""
    cluster: RayConfig | None = None
    """The Ray cluster whose nodes train. None trains on this machine."""
    samplers: int = Field(default=0, ge=0)
    """The number of vLLM processes on the cluster's nodes. With 0, vLLM runs on this machine."""
    sampler_cpus: float = Field(default=1.0, ge=0)
    """The CPUs that Ray reserves for each sampler."""
    sampler_gpus: float | None = Field(default=None, ge=0)
    """The GPUs for each sampler. None reserves one if the cluster has GPUs and the device is not `cpu`."""
    checkpoint_steps: int = Field(default=10, ge=1)
    """Optimiser steps between two checkpoints. An interrupted job resumes from the last one."""
    engine_wait: float = Field(default=30.0, ge=0)
    """Seconds that a request waits for an engine that was stopped."""
    stop_engine_for_jobs: bool = False
    """Stop the engine while jobs train, so that they have the device."""
    log_level: LogLevel = LogLevel.INFO
    """The lowest level of log lines to show, also in training processes."""
    drain: float = Field(default=30.0, ge=0)
    """Seconds that running requests have to finish when the server stops."""


class WorkerOrder(BaseModel, frozen=True):
    """The job of a worker. It can appear on a command line, so it contains no secrets."""

    job: str
    settings: ServerSettings
    """The server's settings, without its key and with the resolved number of training processes."""


def server_settings(**given: Any) -> ServerSettings:
    """Return the checked settings. Raises RequestError that names the wrong option.

    A server that other machines can reach must have a key.
    """
    try:
        settings = ServerSettings(**given)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        option = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-")
        raise RequestError(f"{option}: {first['msg']}") from error
    if settings.engine != "vllm":
        for option, values in {
            "--vllm-arg": settings.vllm_args,
            "--vllm-device": settings.vllm_devices,
            "--samplers": (settings.samplers,) * bool(settings.samplers),
        }.items():
            if values:
                raise RequestError(f"{option} {values[0]} needs --engine vllm")
    if settings.samplers and settings.cluster is None:
        raise RequestError("--samplers places vLLM processes on a cluster; name one: --on auto")
    if settings.samplers and settings.vllm_devices:
        raise RequestError(
            "--samplers are placed on the nodes of a cluster, and --vllm-device names devices of this "
            "machine; leave one of them out"
        )
    if settings.api_key is None and not is_loopback(settings.host):
        raise RequestError(
            f"--host {settings.host} lets other machines in, but there is no API key; put one in an "
            "environment variable and name it: --api-key-env ETUDE_API_KEY"
        )
    if settings.api_key is not None and not settings.api_key.get_secret_value().strip():
        raise RequestError("the API key is empty; put one in the variable that --api-key-env names")
    return settings


def training_processes(settings: ServerSettings) -> int:
    """Return the configured number of training processes, by default one per GPU.

    Raises RequestError if the number exceeds the GPUs to train on.
    """
    if settings.cluster is not None:
        return settings.cluster.learners or 1
    import torch

    # None on the CPU, which any number of processes can share.
    asked, gpus = settings.training_processes, None if settings.device == "cpu" else 1
    if settings.device in ("auto", "cuda"):
        gpus = torch.cuda.device_count() or (1 if torch.backends.mps.is_available() else None)
    if asked is not None and asked > 1 and gpus is not None and asked > gpus:
        there = "one device" if gpus == 1 else f"{gpus} GPUs"
        raise RequestError(
            f"--training-processes {asked} is too many: --device {settings.device} is {there} here; leave it "
            "out, or train with --device cpu"
        )
    return asked or gpus or 1
