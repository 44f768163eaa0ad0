"""Ray clusters: the `cluster` block, the connection, and teams of processes on the nodes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pkgutil
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from etude.config.component import ClusterConfig, Placement
from etude.core.errors import EtudeError, RequestError, StoreError, first_line, require_extra
from etude.store.run_folder import RunLock, lock_holder

if TYPE_CHECKING:
    from etude.learner.team import Team


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
    address: str,
    runtime_env: Mapping[str, Any],
    folder: Path | None,
    *,
    seconds: float,
    shows_output: bool = False,
) -> str | None:
    """Make this process a driver of the cluster, whose workers have `folder` as their current folder.

    Returns the address of Ray's dashboard, or None. Waits up to `seconds` for an answer at the address.
    `shows_output` prints the workers' output here. Raises RequestError.
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


SHARED_FILE = "shared"
"""The head's file in the job's folder. A node that finds other content, or none, has another folder."""

_LOCK_SECONDS = 60.0
"""Seconds for a process of an earlier team to end, after its launcher was killed."""


class HeadLost(EtudeError):
    """The process on the head that started this one has ended, so nobody receives its results."""


class HeadObject:
    """An actor on the head that lets all nodes call an object there, such as its database."""

    def __init__(self, factory: str, argument: str) -> None:
        """Create the object from `argument`. `factory` is the import path of its constructor."""
        self._object = pkgutil.resolve_name(factory)(argument)
        self._stopping = False

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the object or of one of its attributes, such as `jobs.get`."""
        return attrgetter(name)(self._object)(*args, **options)

    def stop(self) -> None:
        """Ask the processes to stop after a checkpoint."""
        self._stopping = True

    def stopping(self) -> bool:
        """Return whether the processes were asked to stop."""
        return self._stopping


@dataclass(frozen=True, slots=True)
class TeamMember:
    """A process's place in its team."""

    rank: int
    node: str
    """The address of its node."""
    folder: Path
    """The job's folder, on storage that all nodes share."""
    mark: str
    """The content of the head's file in that folder."""
    _call: Callable[..., Any]
    """Calls a method of the desk by name. Raises HeadLost."""

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method on the head, like `HeadObject.call`. Raises the method's errors, and HeadLost."""
        return self._call("call", name, *args, **options)

    def stopping(self) -> bool:
        """Return whether the team was asked to stop. Raises HeadLost."""
        return bool(self._call("stopping"))

    def require_shared(self) -> None:
        """Raise StoreError if this node has another job folder than the head, or one without locks."""
        path = self.folder / SHARED_FILE
        try:
            same = path.read_text(encoding="utf-8") == self.mark
        except OSError:
            same = False
        lock = self.folder / "lock"
        problem = None
        if not same:
            problem = "is not the folder that the head has there"
        elif not os.access(self.folder, os.W_OK):
            problem = "is there, but cannot be written to"
        elif lock_holder(lock) is None:
            problem = "is shared without file locks, so that two teams could write at once"
        if problem is not None:
            raise StoreError(
                f"{self.folder} on node {self.node} {problem}; keep the run folder, or the server's "
                "--data-dir, on storage that all nodes mount at the same path, with file locks, as NFS 4 has "
                "them"
            )

    def lock(self, team: Team) -> RunLock:
        """Return this process's lock, held while it trains, so that only one of two teams writes.

        All processes of a team must call this together. Raises PeerLost if a process of an earlier team does
        not end.
        """
        from etude.learner.team import PeerLost

        end, lock = time.monotonic() + _LOCK_SECONDS, None
        path = self.folder / ("leader" if team.leads else f"member-{self.rank}")
        while lock is None and time.monotonic() < end:
            try:
                lock = RunLock(path)
            except StoreError:
                time.sleep(_PAUSE_SECONDS)
        if team.any(lock is None) or lock is None:
            raise PeerLost("a process of an earlier team still trains the job, on another node")
        return lock


CAUSE = "the team has ended: "
"""The prefix of the line with the team's cause of failure."""

_CAUSE = re.compile(rf"^{re.escape(CAUSE)}(.+)$", re.MULTILINE)


class RayTeams(BaseModel, frozen=True):
    """Starts the processes of a team as Ray actors.

    The command is a process on this machine, a node of the cluster, and holds the lock of the job's folder.
    When it ends for any reason, Ray ends the others.
    """

    config: RayConfig
    desk: str
    """The import path of a constructor. Called with the last argument, it makes the head's shared object."""
    on_gpus: bool
    """Whether each process gets a GPU, if the cluster has any."""
    code: Path | None = None
    """The current folder of the processes, with the user's modules."""

    def command(self, module: str, arguments: Sequence[str], processes: int, folder: Path) -> list[str]:
        """Return the command that starts the processes once, when the cluster has room for all of them."""
        asked = {"module": module, "arguments": tuple(arguments), "processes": processes, "folder": folder}
        order = TeamOrder(**dict(self), **asked)
        # Everyone on this machine can read a command line, but only the user can read this file.
        descriptor, path = tempfile.mkstemp(prefix="etude-team-", suffix=".json")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(order.model_dump_json())
        return [sys.executable, "-m", "etude.processes.ray_team", path]

    def first_failure(self, log: str) -> str | None:
        """Return the cause that the command wrote to the log, or None."""
        causes = _CAUSE.findall(log)
        return str(causes[-1]) if causes else None


class TeamOrder(RayTeams):
    """The team to start. Its runtime environment may contain secrets, which only Ray may see."""

    module: str
    """A module whose `main` is called in every process, with the process's seat and the `arguments`."""
    arguments: tuple[str, ...]
    processes: int
    folder: Path
    """The job's folder, on storage that all nodes share."""


_CALL_SECONDS = 120.0
"""Seconds for the head to answer a call."""


class TeamProcess:
    """An actor that runs the module of an order."""

    def address(self) -> tuple[str, int]:
        """Return the address of this process for others: its node and a free port."""
        import ray

        node = str(ray.util.get_node_ip_address())
        with socket.socket() as listening:
            listening.bind(("", 0))
            return node, int(listening.getsockname()[1])

    def run(self, order: TeamOrder, desk: Any, mark: str, rank: int, first: tuple[str, int]) -> None:
        """Run this process's part in a team, whose first process is at `first`. Raises EtudeError."""
        node, _ = self.address()
        # Like torch's launcher. Each process is the only one on its devices, because Ray shows it only its
        # own.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(order.processes)}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": first[0], "MASTER_PORT": str(first[1])}
        seat = TeamMember(rank, node, order.folder, mark, partial(_call, desk))
        if importlib.import_module(order.module).main(seat, *order.arguments):
            raise EtudeError(f"process {rank} on {node} has not done its part; the log says why")


def _call(desk: Any, name: str, *args: Any, **options: Any) -> Any:
    """Call a method of the desk's actor. Raises the method's errors, and HeadLost."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    try:
        return ray.get(getattr(desk, name).remote(*args, **options), timeout=_CALL_SECONDS)
    except RayTaskError as error:
        raise error.cause from error
    except (RayActorError, GetTimeoutError) as error:
        raise HeadLost("the process on the head that started this one ended, or does not answer") from error
