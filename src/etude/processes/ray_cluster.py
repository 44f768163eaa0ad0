"""Ray clusters: the `cluster` block, the connection, and places for teams on the nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from etude.config.component import ClusterConfig, Placement
from etude.core.errors import EngineError, RequestError, first_line, require_extra
from etude.engines.programs import Launcher
from etude.processes.ray_nodes import WaitingLauncher


class RayConfig(ClusterConfig, name="ray"):
    """The nodes of a Ray cluster. This machine must be one of them."""

    address: str = "auto"
    """Set `auto` for this machine's cluster, or `HOST:PORT` of a cluster's head."""
    num_cpus: float = Field(default=1.0, ge=0)
    """Set the CPUs that Ray reserves for each runner."""
    num_gpus: float = Field(default=0.0, ge=0)
    """Set the GPUs for each runner."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Set other resources for each runner, by the names that the nodes have for them."""
    learner_gpus: float | None = Field(default=None, ge=0)
    """Set the GPUs for each learner, besides one CPU. Left out: 1 if the cluster has any, unless the model's
    device is `cpu`."""
    learner_wait: float = Field(default=300.0, gt=0)
    """Set how many seconds a job waits for room for all `learners`. Then the attempt counts as failed."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Set Ray's runtime environment for runners and learners. Left out, Etude sends the config's folder as
    `working_dir`, so that modules next to the config are found."""

    def learner_room(self, cluster: Mapping[str, float], *, on_gpus: bool) -> dict[str, float]:
        """Return the resources for each learner, on a cluster with these total resources."""
        gpus = gpus_each(self.learner_gpus, cluster, on_gpus=on_gpus)
        return {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})

    def check(self, folder: Path | None, *, on_gpus: bool = True) -> list[Placement]:
        """Check whether the current nodes have room for runners and learners."""
        with connect_ray(self.address, self.runtime_env, folder):
            import ray

            nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
            learner_room = self.learner_room(ray.cluster_resources(), on_gpus=on_gpus)
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        runner_room = {name: amount for name, amount in asked.items() if amount}
        groups = [("runners", self.runners, runner_room), ("learners", self.learners or 0, learner_room)]
        return [find_room(*group, nodes) for group in groups if group[1]]


def gpus_each(asked: float | None, cluster: Mapping[str, float], *, on_gpus: bool) -> float:
    """Return the requested GPUs per process, by default 1 if the cluster has any and they may be used."""
    return asked if asked is not None else float(on_gpus and bool(cluster.get("GPU")))


def find_room(
    what: str, count: int, room: Mapping[str, float], nodes: Sequence[dict[str, float]]
) -> Placement:
    """Check whether processes have room on nodes, and subtract it from the nodes' resources."""
    found, used = 0, 0
    for left in nodes:
        before = found
        while found < count and all(left.get(name, 0) >= amount for name, amount in room.items()):
            left.update({name: left[name] - amount for name, amount in room.items()})
            found += 1
        used += found > before
    each = ", ".join(f"{name}: {amount:g}" for name, amount in room.items())
    if found < count:
        there = f"room for {found} of {count} {what} with {{{each}}} on {len(nodes)} nodes"
        return Placement(what, f"{there}; ask for fewer, or add nodes: ray start --address=…", is_ready=False)
    return Placement(what, f"{count} {what} on {used} of {len(nodes)} nodes of Ray")


_ANSWER_SECONDS = 10.0
"""Seconds for a cluster to answer while somebody waits for it."""
_PAUSE_SECONDS = 0.2
_LEFT_OUT = ["runs", ".git", ".venv", "node_modules", "**/__pycache__", ".env", ".env.*"]
"""The paths that are not sent with the folder."""


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
def connect_ray(address: str, runtime_env: Mapping[str, Any], folder: Path | None) -> Iterator[str | None]:
    """Connect this process with the cluster within the block, and send `folder` to its nodes.

    The runtime environment may name another folder. Yields the address of Ray's dashboard, or None. Raises
    MissingExtraError, RequestError.
    """
    require_ray(address)
    import ray

    if ray.is_initialized():
        yield None
        return
    dashboard = connect(address, runtime_env, folder, seconds=_ANSWER_SECONDS)
    try:
        yield dashboard
    finally:
        ray.shutdown()


def connect(
    address: str, runtime_env: Mapping[str, Any], folder: Path | None, *, seconds: float
) -> str | None:
    """Make this process a driver of the cluster, whose workers have `folder` as their current folder.

    Returns the address of Ray's dashboard, or None. Waits up to `seconds` for an answer at the address.
    Raises RequestError.
    """
    import ray

    _wait_for(address, seconds)
    # Etude handles SIGTERM itself, so the warning that Ray does not is useless.
    logging.getLogger("ray._private.worker").addFilter(
        lambda record: "SIGTERM handler is not set" not in record.getMessage()
    )
    # Files can only be sent with the whole connection.
    code = {} if folder is None else {"working_dir": str(folder), "excludes": _LEFT_OUT}
    try:
        context = ray.init(
            address=address, log_to_driver=False, configure_logging=False, runtime_env={**code, **runtime_env}
        )
    except ConnectionError as error:
        raise RequestError(no_cluster(address, first_line(error))) from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError(
            f"Ray cannot connect with {address}, or cannot send '{folder}' to its nodes: "
            f"{first_line(error)}\n"
            "Where it is the folder, name what is to go along: `cluster: {runtime_env: {working_dir: …, "
            "excludes: […]}}`"
        ) from error
    return f"http://{context.dashboard_url}" if context.dashboard_url else None


def no_cluster(address: str, reason: str) -> str:
    """Return the error text for a missing cluster."""
    return (
        f"there is no Ray cluster at {address} that this machine is a node of ({reason}); start one: `ray "
        "start --head`, or join one: `ray start --address=HOST:6379`"
    )


def _wait_for(address: str, seconds: float) -> None:
    """Wait until a head with an address listens. Ray itself tries for many minutes. Raises RequestError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                reason = f"no answer within {seconds:g} s: {error.strerror or error}"
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
    if not _is_connected():
        # In a thread: in the main thread, Ray would take over SIGTERM.
        await asyncio.to_thread(
            connect,
            config.address,
            config.runtime_env,
            code,
            seconds=min(_ANSWER_SECONDS, config.learner_wait),
        )
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    seconds = config.learner_wait
    room = config.learner_room(ray.cluster_resources(), on_gpus=on_gpus)
    group = placement_group([room] * count, strategy="PACK")
    try:
        if not await _ready(group, seconds):
            words = " and ".join(f"{amount:g} {name}" for name, amount in room.items())
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            rooms = "; ".join(f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU" for node in alive)
            raise EngineError(
                f"the cluster had no room for {count} processes of {words} within {seconds:g} s: it has "
                f"{len(alive)} nodes ({rooms}); add nodes, or ask for fewer"
            )
        gpus = room.get("GPU", 0)
        yield [
            WaitingLauncher(room["CPU"], gpus, seconds, PlacementGroupSchedulingStrategy(group, index))
            for index in range(count)
        ]
    finally:
        remove_placement_group(group)


async def _ready(group: Any, seconds: float) -> bool:
    """Wait for a placement group. Return whether it has its room within these `seconds`."""
    end = time.monotonic() + seconds
    while not await asyncio.to_thread(group.wait, _PAUSE_SECONDS):
        if time.monotonic() >= end:
            return False
    return True


def _is_connected() -> bool:
    require_extra("ray", "a Ray cluster", "ray")
    import ray

    return bool(ray.is_initialized())
