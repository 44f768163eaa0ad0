"""The component `cluster: {_type: ray}`: the connection, and places for runners and learners on the nodes."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from pydantic import Field

from etude.config.builder import Builder
from etude.config.component import ClusterConfig
from etude.config.registry import register_cluster
from etude.config.schema import Config
from etude.core.errors import EngineError, RequestError, first_line, require_extra
from etude.engines.programs import Launcher
from etude.processes.pool import Cluster
from etude.processes.ray_nodes import ROOM_SECONDS, RayLauncher

_ANSWER_SECONDS = 10.0
"""Seconds for a cluster to answer while somebody waits for it."""
_PAUSE_SECONDS = 0.2
_LEFT_OUT = ["runs", ".git", ".venv", "node_modules", "**/__pycache__", ".env", ".env.*"]
"""The paths that are not sent with the folder."""


class RayConfig(ClusterConfig, name="ray"):
    """The nodes of a Ray cluster. This machine must be one of them."""

    address: str = "auto"
    """Set `auto` for this machine's cluster, or `HOST:PORT` of a cluster's head."""
    num_cpus: float = Field(default=1.0, ge=0)
    """Set the CPUs that Ray reserves for each runner."""
    num_gpus: float = Field(default=0.0, ge=0)
    """Set the GPUs for each runner."""

    def check(self, folder: Path | None) -> str:
        """Return how many nodes and what resources the cluster has. Raises RequestError if there is none."""
        with connect_ray(self.address, folder):
            import ray

            has = ray.cluster_resources()
            nodes = sum(node["Alive"] for node in ray.nodes())
        return f"{nodes} nodes of Ray with {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs"


def gpus_each(asked: float | None, cluster: Mapping[str, float], *, on_gpus: bool) -> float:
    """Return the requested GPUs per process, by default 1 if the cluster has any and they may be used."""
    return asked if asked is not None else float(on_gpus and bool(cluster.get("GPU")))


def require_ray(address: str) -> None:
    """Raise MissingExtraError without Ray, RequestError for an address of Ray's client."""
    require_extra("ray", "a Ray cluster", "ray")
    if address.startswith("ray://"):
        raise RequestError(
            f"{address} is an address for Ray's client, and the processes on the nodes call the one "
            "that starts them: this machine must be a node of the cluster. `ray start --address=HOST:6379 "
            "--num-cpus=0` makes it one that runs nothing else, and the address is then `auto`"
        )


@contextlib.contextmanager
def connect_ray(address: str, folder: Path | None) -> Iterator[None]:
    """Connect this process with the cluster within the block, unless it is connected already.

    Raises MissingExtraError, RequestError.
    """
    require_ray(address)
    import ray

    if ray.is_initialized():
        yield
        return
    connect(address, folder)
    try:
        yield
    finally:
        ray.shutdown()


def connect(address: str, folder: Path | None) -> None:
    """Make this process a driver of the cluster, whose workers have `folder` as their current folder.

    Raises RequestError.
    """
    import ray

    _wait_for(address)
    # Etude handles SIGTERM itself, so the warning that Ray does not is useless.
    logging.getLogger("ray._private.worker").addFilter(
        lambda record: "SIGTERM handler is not set" not in record.getMessage()
    )
    # Files can only be sent with the whole connection.
    code = {} if folder is None else {"working_dir": str(folder), "excludes": _LEFT_OUT}
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, runtime_env=code)
    except ConnectionError as error:
        raise RequestError(no_cluster(address, first_line(error))) from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError(
            f"Ray cannot connect to {address}, or cannot send '{folder}' to its nodes: "
            f"{first_line(error)}\n"
            "Ray leaves out what a .gitignore in the folder names"
        ) from error


def no_cluster(address: str, reason: str) -> str:
    """Return the error text for a missing cluster."""
    return (
        f"there is no Ray cluster at {address} that this machine is a node of ({reason}); start one: `ray "
        "start --head`, or join one: `ray start --address=HOST:6379`"
    )


def _wait_for(address: str) -> None:
    """Wait until a head with an address listens. Ray itself tries for many minutes. Raises RequestError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    end = time.monotonic() + _ANSWER_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                reason = f"no answer within {_ANSWER_SECONDS:g} s: {error.strerror or error}"
                raise RequestError(no_cluster(address, reason)) from error
            time.sleep(_PAUSE_SECONDS)


@asynccontextmanager
async def ray_places(
    count: int, *, config: RayConfig, on_gpus: bool, code: Path | None = None
) -> AsyncIterator[Sequence[Launcher]]:
    """Reserve a place on the cluster's nodes for each process of a team, all together.

    `on_gpus`: each process gets a GPU, if the cluster has any. `code` is the current folder of the processes,
    unless this process is connected already. Raises EngineError without room in time, RequestError.
    """
    require_ray(config.address)
    import ray

    if not ray.is_initialized():
        # In a thread: in the main thread, Ray would take over SIGTERM.
        await asyncio.to_thread(connect, config.address, code)
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = gpus_each(None, ray.cluster_resources(), on_gpus=on_gpus)
    room = {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})
    group = placement_group([room] * count, strategy="PACK")
    try:
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                while not await asyncio.to_thread(group.wait, _PAUSE_SECONDS):
                    pass
        except TimeoutError as error:
            words = " and ".join(f"{amount:g} {name}" for name, amount in room.items())
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            rooms = "; ".join(f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU" for node in alive)
            raise EngineError(
                f"the cluster had no room for {count} processes of {words} within {ROOM_SECONDS:g} s: it has "
                f"{len(alive)} nodes ({rooms}); add nodes, or ask for fewer"
            ) from error
        yield [
            RayLauncher(1.0, gpus, strategy=PlacementGroupSchedulingStrategy(group, index))
            for index in range(count)
        ]
    finally:
        remove_placement_group(group)


@register_cluster(config_type=RayConfig)
async def ray_cluster(config: RayConfig, builder: Builder) -> AsyncIterator[Cluster]:
    """Place runners and learners on a cluster. Raises RequestError if there is none."""
    if builder.run is None:
        raise RequestError("processes on a cluster need a run folder")
    require_used(config, builder.config)
    file = builder.config.finetuning.run_configuration.config_file
    # The folder to send: the config file's, or the current one.
    folder = (file.parent if file is not None else Path()).absolute()
    connection = connect_ray(config.address, folder)
    # In a thread: in the main thread, Ray would take over SIGTERM.
    await asyncio.to_thread(connection.__enter__)
    try:
        runners = RayLauncher(config.num_cpus, config.num_gpus) if config.runners else None
        yield Cluster(runners, partial(ray_places, config=config) if config.learners else None)
    finally:
        await asyncio.to_thread(connection.__exit__, None, None, None)


def require_used(cluster: ClusterConfig, config: Config) -> None:
    """Raise RequestError for learners without an adapter that could use them."""
    kinds = [adapter.type_name for adapter in config.trainer_adapters.values()]
    if cluster.learners is not None and config.finetuning.enabled and "local" not in kinds:
        raise RequestError(
            f"cluster.learners train for the adapter 'local', and the config has {', '.join(kinds)}: leave "
            "them out, or set `trainer_adapters: {local: {_type: local}}`"
        )
