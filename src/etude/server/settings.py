"""The settings of a server and of its workers, which are the options of `etude serve`.

The command line reads them from here, so nothing slow is imported at the top.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from etude.core.errors import RequestError

if TYPE_CHECKING:
    from etude.processes.ray_cluster import RayConfig


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of one server process. A list can be given one value at a time."""

    model: Annotated[str, Argument(help="A model folder, or a name on the Hugging Face hub.")]
    name: Annotated[str, Option(help="What clients call the model; by default the name of its folder.")] = ""
    host: Annotated[str, Option(help="Address to listen on; others than loopback need a key.")] = "127.0.0.1"
    port: Annotated[int, Option(help="0 takes a free one.", min=0, max=65535)] = 8000
    data_dir: Annotated[Path, Option(help="Where files, jobs and new models are kept.")] = Path("server")
    engine: Annotated[
        Literal["embedded", "vllm"], Option(help="What samples: in this process, or a vLLM of the server's.")
    ] = "embedded"
    vllm_command: Annotated[str, Option(help="The command that starts vLLM.")] = "vllm"
    vllm_arg: Annotated[tuple[str, ...], Option(help="An option of `vllm serve`; repeatable.")] = ()
    vllm_device: Annotated[
        tuple[str, ...],
        Option(help="A vLLM of its own on this GPU (on a CPU: on these cores, as 0-7). Repeatable."),
    ] = ()
    device: Annotated[str, Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Option(help="The dtype of the weights.")
    ] = "auto"
    max_models: Annotated[int, Option(help="Maximum number of models in memory.", min=1)] = 3
    running_jobs: Annotated[int, Option(help="Training jobs at once.", min=1)] = 1
    training_processes: Annotated[
        int | None, Option(help="Processes that train a job together; by default one for each GPU.", min=1)
    ] = None
    on: Annotated[
        str | None,
        Option(
            help="Train, and with --samplers sample, on a Ray cluster: auto, or HOST:PORT of its head.",
            metavar="ADDRESS",
        ),
    ] = None
    samplers: Annotated[int, Option(help="With --on and --engine vllm: vLLMs on the nodes.", min=0)] = 0
    sampler_gpus: Annotated[
        float | None, Option(help="GPUs for each of them; by default one where there are any.", min=0)
    ] = None
    shard_training: Annotated[
        bool, Option("--shard-training", help="Split weights and optimiser state among the processes.")
    ] = False
    algorithms: Annotated[
        tuple[str, ...],
        Option(help="An algorithm of yours that jobs may name, as module:Name; it is imported. Repeatable."),
    ] = ()
    checkpoint_steps: Annotated[int, Option(help="Training steps between two checkpoints.", min=1)] = 10
    engine_wait: Annotated[float, Option(help="Seconds that requests wait for the engine.", min=0)] = 30.0
    log_level: int = logging.INFO
    """The lowest level of log lines to show, also in training processes."""
    api_key: str | None = field(default=None, repr=False)
    """The key that clients must have."""

    @property
    def cluster(self) -> RayConfig | None:
        """The Ray cluster whose nodes train. None trains on this machine."""
        if self.on is None:
            return None
        from etude.processes.ray_cluster import RayConfig

        return RayConfig(address=self.on, runners=0, learners=self.training_processes or 1)


def server_settings(**given: Any) -> ServerSettings:
    """Return the checked settings. Raises RequestError that names the wrong option.

    A server that other machines can reach must have a key.
    """
    from pydantic import TypeAdapter, ValidationError

    from etude.wire.http_server import is_loopback

    try:
        settings = TypeAdapter(ServerSettings).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        option = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-")
        raise RequestError(f"{option}: {first['msg']}") from error
    if settings.engine != "vllm":
        for name in ("vllm_arg", "vllm_device", "samplers"):
            if getattr(settings, name):
                raise RequestError(f"--{name.replace('_', '-')} needs --engine vllm")
    if settings.samplers and settings.on is None:
        raise RequestError("--samplers places vLLM processes on a cluster; name one: --on auto")
    if settings.samplers and settings.vllm_device:
        raise RequestError("--samplers are on a cluster, --vllm-device is of this machine; leave one out")
    if settings.api_key is None and not is_loopback(settings.host):
        raise RequestError(
            f"--host {settings.host} lets other machines in, but there is no API key; put one in an "
            "environment variable and name it: --api-key-env ETUDE_API_KEY"
        )
    if settings.api_key is not None and not settings.api_key.strip():
        raise RequestError("the API key is empty; put one in the variable that --api-key-env names")
    return settings


def training_processes(settings: ServerSettings) -> int:
    """Return the configured number of training processes, by default one per GPU.

    Raises RequestError if the number exceeds the GPUs to train on.
    """
    processes = settings.training_processes
    if settings.on is not None:
        return processes or 1
    import torch

    # None on the CPU, which any number of processes can share.
    gpus = None if settings.device == "cpu" else 1
    if settings.device in ("auto", "cuda"):
        gpus = torch.cuda.device_count() or (1 if torch.backends.mps.is_available() else None)
    if processes is not None and processes > 1 and gpus is not None and processes > gpus:
        there = "one device" if gpus == 1 else f"{gpus} GPUs"
        raise RequestError(
            f"--training-processes {processes} is too many: --device {settings.device} is {there} here; "
            "leave it out, or train with --device cpu"
        )
    return processes or gpus or 1
