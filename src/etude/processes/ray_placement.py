"""The component for `cluster: {_type: ray}`: where a run's runners and learners are placed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from etude.config.document import dotted
from etude.config.load import find_secrets
from etude.config.registry import register_cluster
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.processes.pool import Cluster
from etude.processes.ray_cluster import RayConfig, connect_ray, ray_places, require_ray
from etude.processes.ray_nodes import RayLauncher

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.config.component import ClusterConfig


@register_cluster(config_type=RayConfig)
async def ray_cluster(config: RayConfig, builder: Builder) -> AsyncIterator[Cluster]:
    """Place runners and learners on a cluster. Raises RequestError if there is none."""
    if builder.run is None:
        raise RequestError("processes on a cluster need a run folder")
    require_ray(config.address)
    _require_no_secrets(builder.config)
    require_used(config, builder.config)
    file = builder.config.finetuning.run_configuration.config_file
    # The folder to send: the config file's, or the current one.
    folder = (file.parent if file is not None else Path()).absolute()
    connection = connect_ray(config.address, config.runtime_env, folder)
    # In a thread: in the main thread, Ray would take over SIGTERM.
    dashboard = await asyncio.to_thread(connection.__enter__)
    try:
        runners = RayLauncher(config.num_cpus, config.num_gpus, config.resources) if config.runners else None
        yield Cluster(runners, dashboard, partial(ray_places, config=config) if config.learners else None)
    finally:
        await asyncio.to_thread(connection.__exit__, None, None, None)


def _require_no_secrets(config: Config) -> None:
    """Raise RequestError for secrets and environment variables in Ray's runtime environment.

    Ray keeps runtime environments in its head, and writes them into its logs.
    """
    reasons = {
        path: f"comes from the environment ({text})"
        for path, text in config._as_written.items()
        if "$" in text and path[2:3] not in (("working_dir",), ("py_modules",))
    }
    secrets = find_secrets(config, config.model_dump(mode="json", fallback=str), sure=True)
    for path, reason in [*reasons.items(), *((path, "is a secret") for path in secrets)]:
        if path[:2] == ("cluster", "runtime_env"):
            raise RequestError(
                f"{dotted(path)} {reason}, and Ray writes runtime environments into its logs for everybody "
                "to read; set the variable on every node before `ray start`"
            )


def require_used(cluster: ClusterConfig, config: Config) -> None:
    """Raise RequestError for learners without an adapter that could use them."""
    kinds = [adapter.type_name for adapter in config.trainer_adapters.values()]
    if cluster.learners is not None and config.finetuning.enabled and "local" not in kinds:
        raise RequestError(
            f"cluster.learners train for the adapter 'local', and the config has {', '.join(kinds)}: leave "
            "them out, or set `trainer_adapters: {local: {_type: local}}`"
        )
