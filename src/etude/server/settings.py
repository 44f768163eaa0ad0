"""How a server runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr, ValidationError

from etude.cluster.launch import RayConfig
from etude.core.errors import RequestError
from etude.report.logs import LogLevel
from etude.wire.http_server import is_loopback

_MEBIBYTE = 2**20

LIFELINE = "ETUDE_SERVER_LIFELINE"
"""The variable with the descriptor by which workers notice that their server is no more."""


class ServerSettings(BaseModel, frozen=True, extra="forbid"):
    """The settings of one server process."""

    model: str
    """A model folder, or a name on the Hugging Face hub."""
    name: str = Field(min_length=1)
    """The name of that model for clients."""
    data_dir: Path
    """Where files, jobs and fine-tuned models are kept."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one."""
    api_key: SecretStr | None = None
    engine: Literal["embedded", "vllm"] = "embedded"
    """The engine that samples: in this process, or a vLLM that the server runs."""
    vllm_command: str = "vllm"
    """vLLM's program, as a shell would take it."""
    vllm_args: tuple[str, ...] = ()
    """More options of `vllm serve`."""
    vllm_devices: tuple[str, ...] = ()
    """The device of each of several vLLM processes; without any there is one, on all that there is."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_batch: int = Field(default=256, ge=1)
    """Sequences that an engine samples at once."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of a chat completion that asks for no number."""
    max_queue: int = Field(default=1024, ge=1)
    """Sequences under way and waiting; more are refused with 429."""
    max_models: int = Field(default=3, ge=1)
    """Models in memory at once."""
    max_body: int = Field(default=32 * _MEBIBYTE, ge=1024)
    """Bytes of a request, but for uploads."""
    max_file: int = Field(default=512 * _MEBIBYTE, ge=1024)
    """Bytes of an uploaded file."""
    max_connections: int = Field(default=2048, ge=1)
    """Connections at once, idle ones among them; beyond them requests are answered with 503."""
    running_jobs: int = Field(default=1, ge=1)
    """Training jobs at once."""
    training_processes: int | None = Field(default=None, ge=1)
    """Processes that train a job together; None takes one for each GPU."""
    algorithms: tuple[str, ...] = ()
    """Algorithms of one's own that jobs may name, as import paths `module:Name`; the server imports them."""
    shard_training: bool = False
    """Whether each of these processes holds only a part of the weights and of the optimiser's state."""
    cluster: RayConfig | None = None
    """The Ray cluster whose nodes train; None trains on this machine."""
    samplers: int = Field(default=0, ge=0)
    """vLLM processes on the nodes of the cluster; without any they are on this machine."""
    sampler_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray sets aside for each of them."""
    sampler_gpus: float | None = Field(default=None, ge=0)
    """GPUs for each; None takes one where the cluster has any, unless the device is `cpu`."""
    waiting_jobs: int = Field(default=100, ge=1)
    """Jobs in the queue; more are refused with 429."""
    checkpoint_steps: int = Field(default=10, ge=1)
    """Optimiser steps between two checkpoints that an interrupted job resumes from."""
    engine_wait: float = Field(default=30.0, ge=0)
    """Seconds that a request waits for an engine that was put away."""
    stop_engine_for_jobs: bool = False
    """Put the engine away while jobs train, to leave them the device."""
    log_level: LogLevel = LogLevel.INFO
    """From which level on log lines are shown, those of training processes too."""
    drain: float = Field(default=30.0, ge=0)
    """Seconds that requests under way have to finish when the server is stopped."""


class WorkerOrder(BaseModel, frozen=True):
    """The job of a worker. It may be on the worker's command line, and has no secrets."""

    job: str
    settings: ServerSettings
    """The server's, without its key, and with the number of processes that train the job together."""


def server_settings(**given: Any) -> ServerSettings:
    """The settings, checked. Raises RequestError that names what is wrong."""
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
                raise RequestError(f"{option} {values[0]}: there is no vLLM without --engine vllm")
    if settings.samplers and settings.cluster is None:
        raise RequestError("--samplers places vLLM processes on a cluster; name one: --on auto")
    if settings.samplers and settings.vllm_devices:
        raise RequestError(
            "--samplers are placed on the nodes of a cluster, and --vllm-device names devices of this "
            "machine; leave one of them out"
        )
    return settings


def require_safe(settings: ServerSettings) -> None:
    """Raise RequestError for a server that others can reach and that has no key."""
    if settings.api_key is None and not is_loopback(settings.host):
        raise RequestError(
            f"--host {settings.host} lets other machines in, and there is no API key; put one in an "
            "environment variable and name it: --api-key-env ETUDE_API_KEY"
        )
    if settings.api_key is not None and not settings.api_key.get_secret_value().strip():
        raise RequestError("the API key is empty; put one in the variable that --api-key-env names")


def training_processes(settings: ServerSettings) -> int:
    """As many as the settings say, or else one for each GPU.

    Raises RequestError when there are more than GPUs to train on.
    """
    if settings.cluster is not None:
        return settings.cluster.learners or 1
    import torch

    # None on the CPU, which any number of processes share.
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
