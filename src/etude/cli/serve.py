"""`etude serve MODEL`: the language-model server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from etude.cli.command import argument, option, read_env_key
from etude.cli.console import say, warn

if TYPE_CHECKING:
    from etude.server.settings import ServerSettings

Algorithms = Annotated[
    list[str] | None,
    option("An algorithm of your own that jobs may name, as module:Name; it is imported. Repeatable."),
]

Devices = Annotated[
    list[str] | None, option("A vLLM of its own on this GPU (on a CPU: on these cores, as 0-7). Repeatable.")
]
Processes = Annotated[
    int | None, option("Processes that train a job together; left out: one for each GPU.", min=1)
]
Cluster = Annotated[
    str | None, option("Train, and with --samplers sample, on a Ray cluster: auto, or HOST:PORT of its head.")
]
Samplers = Annotated[int, option("With --on and --engine vllm: vLLM processes on the nodes.", min=0)]
SamplerCpus = Annotated[float, option("CPUs that Ray sets aside for each of them.", min=0)]
SamplerGpus = Annotated[
    float | None, option("GPUs for each of them; left out: one where there are any.", min=0)
]
Shard = Annotated[bool, option("Share weights and optimiser out among them.", "--shard-training")]
StopEngine = Annotated[bool, option("Free the device while jobs train.", "--stop-engine-for-jobs")]


def serve(
    model: Annotated[str, argument("A model folder, or a name on the Hugging Face hub.")],
    name: Annotated[
        str | None, option("What clients call the model; left out: the name of its folder.")
    ] = None,
    host: Annotated[str, option("Address to listen on; others than loopback need a key.")] = "127.0.0.1",
    port: Annotated[int, option("0 takes a free one.", min=0, max=65535)] = 8000,
    api_key_env: Annotated[
        str | None, option("Environment variable with the key that clients must have.")
    ] = None,
    data_dir: Annotated[Path, option("Where files, jobs and new models are kept.")] = Path("server"),
    engine: Annotated[str, option("What samples: embedded, or vllm, which the server runs.")] = "embedded",
    vllm_command: Annotated[str, option("vLLM's program.")] = "vllm",
    vllm_arg: Annotated[list[str] | None, option("An option of `vllm serve`; repeatable.")] = None,
    vllm_device: Devices = None,
    device: Annotated[str, option("auto, cpu, cuda, cuda:N or mps.")] = "auto",
    dtype: Annotated[str, option("auto, float32, bfloat16 or float16.")] = "auto",
    max_batch: Annotated[int, option("Sequences sampled at once.", min=1)] = 256,
    max_queue: Annotated[int, option("Maximum number of sequences, running and waiting.", min=1)] = 4096,
    max_models: Annotated[int, option("Maximum number of models in memory.", min=1)] = 3,
    max_file_mb: Annotated[int, option("Largest upload, in MiB.", min=1)] = 512,
    running_jobs: Annotated[int, option("Training jobs at once.", min=1)] = 1,
    training_processes: Processes = None,
    on: Cluster = None,
    samplers: Samplers = 0,
    sampler_cpus: SamplerCpus = 1.0,
    sampler_gpus: SamplerGpus = None,
    shard_training: Shard = False,
    algorithms: Algorithms = None,
    checkpoint_steps: Annotated[int, option("Training steps between two checkpoints.", min=1)] = 10,
    engine_wait: Annotated[float, option("Seconds that requests wait for the engine.", min=0)] = 30.0,
    stop_engine_for_jobs: StopEngine = False,
    drain: Annotated[float, option("Seconds that requests have to finish at the end.", min=0)] = 30.0,
) -> None:
    """Serve and train a model behind OpenAI's API. Runs until Ctrl-C or SIGTERM."""
    options = dict(locals())
    learners = training_processes or 1
    options["cluster"] = None if on is None else {"address": on, "runners": 0, "learners": learners}
    del options["on"]
    api_key_env, max_file_mb = options.pop("api_key_env"), options.pop("max_file_mb")
    lists = {"vllm_args": options.pop("vllm_arg"), "vllm_devices": options.pop("vllm_device")}
    options |= {key: tuple(given or ()) for key, given in {"algorithms": algorithms, **lists}.items()}
    _require_extras()
    from etude.models.source import local_path, locate
    from etude.server.settings import server_settings

    folder = local_path(model)
    options["name"] = name or (model if folder is None else folder.resolve().name)
    options["log_level"] = logging.getLevelName(logging.root.level).lower()
    options["api_key"] = read_env_key(api_key_env)
    settings = server_settings(**options, max_file=max_file_mb * 2**20)
    locate(settings.model)
    _say_placements(settings)
    # Imported last, because it loads torch: errors in the options appear without that wait.
    from etude.server.serve import serve as run

    text = "serving {name} at {address}/v1; {address}/docs lists what it answers. Ctrl-C stops it."
    run(settings, lambda address: say(text.format(name=settings.name, address=address)))


def _say_placements(settings: ServerSettings) -> None:
    """Print whether there is room for the job processes now. Raises RequestError without a cluster."""
    from concurrent.futures import ThreadPoolExecutor

    if settings.cluster is None:
        return
    code, on_gpus = (Path.cwd() if settings.algorithms else None), settings.device != "cpu"
    # In the main thread, Ray would take over SIGTERM.
    with ThreadPoolExecutor(1) as thread:
        placements = thread.submit(settings.cluster.check, code, on_gpus=on_gpus).result()
    for placement in placements:
        mark = "✓" if placement.is_ready else "!"
        warn(f"{mark} {placement.what}: {placement.detail}")


def _require_extras() -> None:
    from importlib.util import find_spec

    from etude.core.errors import MissingExtraError
    from etude.engines.local import require_local_extra

    require_local_extra()
    missing = [name for name in ("prometheus_client", "python_multipart") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"the server ({', '.join(missing)} not installed)", "server")
