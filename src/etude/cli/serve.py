"""`etude serve MODEL`: the language-model server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from etude.cli.command import LOG_LEVEL
from etude.cli.console import say


def _option(help: str, **bounds: Any) -> Any:
    return typer.Option(help=help, **bounds)


Algorithms = Annotated[
    list[str] | None,
    _option("An algorithm of your own that jobs may name, as module:Name; it is imported. Repeatable."),
]


def serve(
    model: Annotated[
        str, typer.Argument(help="A model folder, or a name on the Hugging Face hub.", show_default=False)
    ],
    name: Annotated[
        str | None, _option("What clients call the model; left out: the name of its folder.")
    ] = None,
    host: Annotated[str, _option("Address to listen on; others than loopback need a key.")] = "127.0.0.1",
    port: Annotated[int, _option("0 takes a free one.", min=0, max=65535)] = 8000,
    api_key_env: Annotated[
        str | None, _option("Environment variable with the key that clients must have.")
    ] = None,
    data_dir: Annotated[Path, _option("Where files, jobs and new models are kept.")] = Path("server"),
    engine: Annotated[str, _option("What samples: embedded, or vllm, which the server runs.")] = "embedded",
    vllm_command: Annotated[str, _option("vLLM's program.")] = "vllm",
    vllm_arg: Annotated[list[str] | None, _option("An option of `vllm serve`; repeatable.")] = None,
    device: Annotated[str, _option("auto, cpu, cuda, cuda:N or mps.")] = "auto",
    dtype: Annotated[str, _option("auto, float32, bfloat16 or float16.")] = "auto",
    max_batch: Annotated[int, _option("Sequences sampled at once.", min=1)] = 256,
    max_queue: Annotated[int, _option("Sequences under way and waiting.", min=1)] = 1024,
    requests_per_minute: Annotated[
        int | None, _option("Requests of one client address; left out: no limit.", min=1)
    ] = None,
    max_models: Annotated[int, _option("Models in memory at once.", min=1)] = 3,
    max_file_mb: Annotated[int, _option("Largest upload, in MiB.", min=1)] = 512,
    running_jobs: Annotated[int, _option("Training jobs at once.", min=1)] = 1,
    training_processes: Annotated[
        int | None, _option("Processes that train a job together; left out: one for each GPU.", min=1)
    ] = None,
    shard_training: Annotated[
        bool, typer.Option("--shard-training", help="Share weights and optimiser out among them.")
    ] = False,
    algorithms: Algorithms = None,
    waiting_jobs: Annotated[int, _option("Training jobs in the queue.", min=1)] = 100,
    checkpoint_steps: Annotated[int, _option("Training steps between two checkpoints.", min=1)] = 10,
    body_timeout: Annotated[float, _option("Seconds to wait for more of a request.", min=1)] = 30.0,
    engine_wait: Annotated[float, _option("Seconds that requests wait for the engine.", min=0)] = 30.0,
    stop_engine_for_jobs: Annotated[
        bool, typer.Option("--stop-engine-for-jobs", help="Free the device while jobs train.")
    ] = False,
    drain: Annotated[float, _option("Seconds that requests have to finish at the end.", min=0)] = 30.0,
) -> None:
    """Serve a model, and train it, behind OpenAI's API. Runs until Ctrl-C or SIGTERM."""
    options = {
        key: value for key, value in locals().items() if key not in ("api_key_env", "max_file_mb", "vllm_arg")
    }
    _require_extras()
    from etude.models.source import locate
    from etude.server.settings import MEBIBYTE, require_safe, server_settings

    options |= {"name": name or _name_of(model), "api_key": _key(api_key_env)}
    options["algorithms"] = tuple(algorithms or ())
    options |= {"vllm_args": tuple(vllm_arg or ()), "log_level": LOG_LEVEL.get()}
    settings = server_settings(**options, max_file=max_file_mb * MEBIBYTE)
    require_safe(settings)
    locate(settings.model)
    # Only now: it loads torch, and whoever typed something wrong need not wait for that.
    from etude.server.serve import serve as run

    run(settings, lambda address: _say_ready(settings.name, address))


def _say_ready(name: str, address: str) -> None:
    say(f"serving {name} at {address}/v1; {address}/docs lists what it answers. Ctrl-C stops it.")


def _name_of(model: str) -> str:
    from etude.models.source import folder_of

    folder = folder_of(model)
    return model if folder is None else folder.resolve().name


def _key(variable: str | None) -> str | None:
    import os

    from etude.core.errors import RequestError

    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise RequestError(f"the environment variable {variable} is not set or empty; put the API key there")
    return key


def _require_extras() -> None:
    from importlib.util import find_spec

    from etude.core.errors import MissingExtraError
    from etude.inference.local import require_local_extra

    require_local_extra()
    missing = [name for name in ("prometheus_client", "python_multipart") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"the server ({', '.join(missing)} not installed)", "server")
