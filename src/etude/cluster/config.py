"""The `cluster` block for the nodes of a Ray cluster, whether they have room, and the connection with it."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field

from etude.config.component import ClusterConfig, Placement
from etude.core.errors import MissingExtraError, RequestError, first_line


class RayConfig(ClusterConfig, name="ray"):
    """The nodes of a Ray cluster, of which this machine is one."""

    address: str = "auto"
    """`auto` for the cluster that this machine is a node of, or `HOST:PORT` of its head."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray sets aside for each runner."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs for each runner."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Other resources for each runner, by the names that the nodes were given."""
    learner_gpus: float | None = Field(default=None, ge=0)
    """GPUs for each learner, beside a CPU; left out: one where the cluster has any, unless the model's device
    is `cpu`."""
    learner_wait: float = Field(default=300.0, gt=0)
    """Seconds that a job waits for room for all of `learners`, before the attempt counts as failed."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of runners and learners. Left out, the config's folder goes along as
    `working_dir`, so that modules beside the config are found."""

    def learner_room(self, cluster: Mapping[str, float], *, on_gpus: bool) -> dict[str, float]:
        """The resources for each learner on a cluster that has these in all."""
        gpus = self.learner_gpus
        if gpus is None:
            gpus = 1.0 if on_gpus and cluster.get("GPU") else 0.0
        return {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})

    def check(self, folder: Path | None, *, on_gpus: bool = True) -> list[Placement]:
        """Whether the nodes that are there now have room for runners and learners."""
        with connected(self.address, self.runtime_env, folder):
            import ray

            nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
            learner_room = self.learner_room(ray.cluster_resources(), on_gpus=on_gpus)
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        runner_room = {name: amount for name, amount in asked.items() if amount}
        groups = [("runners", self.runners, runner_room), ("learners", self.learners or 0, learner_room)]
        return [placed(*group, nodes) for group in groups if group[1]]


def placed(what: str, count: int, room: Mapping[str, float], nodes: Sequence[dict[str, float]]) -> Placement:
    """Whether processes have room on nodes, of whose resources it is taken."""
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
"""For a cluster to answer where somebody waits for it."""
_PAUSE_SECONDS = 0.2
_LEFT_OUT = ["runs", ".git", ".venv", "node_modules", "**/__pycache__", ".env", ".env.*"]
"""Of the folder that goes along."""


def require_ray(address: str) -> None:
    """Raise MissingExtraError without Ray, RequestError for an address that is not of this kind."""
    if find_spec("ray") is None:
        raise MissingExtraError("a Ray cluster", "ray")
    if address.startswith("ray://"):
        raise RequestError(
            f"{address} is an address for Ray's client, and the processes on the nodes call the one "
            "that starts them: this machine must be a node of the cluster. `ray start --address=HOST:6379 "
            "--num-cpus=0` makes it one that runs nothing else, and the address is then `auto`"
        )


@contextlib.contextmanager
def connected(address: str, runtime_env: Mapping[str, Any], folder: Path | None) -> Iterator[str | None]:
    """Within the block this process is connected with the cluster, to whose nodes `folder` goes along, unless
    the runtime environment names another one. Yields the address of the cluster's own web page, if known.

    Raises MissingExtraError, RequestError.
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
    address: str,
    runtime_env: Mapping[str, Any],
    folder: Path | None,
    *,
    seconds: float,
    shows_output: bool = False,
) -> str | None:
    """Make this process a driver of the cluster, whose workers have `folder` as their current one.

    Returns the address of the cluster's own web page, where it has one.

    It waits for `seconds` for somebody to answer at the address. `shows_output` writes what the workers
    print to this process's output. Raises RequestError.
    """
    import ray

    _wait_for(address, seconds)
    # Etude ends itself on SIGTERM, and need not be told that Ray will not.
    logging.getLogger("ray._private.worker").addFilter(_is_not_about_sigterm)
    # Files can only go along with the whole connection.
    code = {} if folder is None else {"working_dir": str(folder), "excludes": _LEFT_OUT}
    try:
        context = ray.init(
            address=address,
            log_to_driver=shows_output,
            configure_logging=False,
            runtime_env={**code, **runtime_env},
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


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


def no_cluster(address: str, reason: str) -> str:
    """The error where there is no cluster."""
    return (
        f"there is no Ray cluster at {address} that this machine is a node of ({reason}); start one: `ray "
        "start --head`, or join one: `ray start --address=HOST:6379`"
    )


def _wait_for(address: str, seconds: float) -> None:
    """Until a named head listens: Ray itself tries for many minutes. Raises RequestError."""
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
