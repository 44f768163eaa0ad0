"""The nodes of a Ray cluster: the `cluster` block, the connection, and teams of processes on the nodes."""

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
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from etude.config.component import ClusterConfig, Placement
from etude.core.errors import EtudeError, MissingExtraError, RequestError, StoreError, first_line
from etude.store.run_folder import RunLock, locked_by

if TYPE_CHECKING:
    from etude.learner.team import Team


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
        gpus = gpus_each(self.learner_gpus, cluster, on_gpus=on_gpus)
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


def gpus_each(asked: float | None, cluster: Mapping[str, float], *, on_gpus: bool) -> float:
    """Those asked for, or else one for each process, where the cluster has any and they are to be used."""
    return asked if asked is not None else float(on_gpus and bool(cluster.get("GPU")))


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
    logging.getLogger("ray._private.worker").addFilter(
        lambda record: "SIGTERM handler is not set" not in record.getMessage()
    )
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


MARK = "shared"
"""A file of the head's in the job's folder: a node that has another one, or none, has another folder."""

_LOCK_SECONDS = 60.0
"""In which a process of an earlier team ends, whose launcher was killed."""


class HeadLost(EtudeError):
    """The process on the head that started this one has ended: nobody can be told what it does."""


class Desk:
    """An object on the head, as its database that no other machine can open; called from all nodes."""

    def __init__(self, factory: str, argument: str) -> None:
        """`factory` is the import path of what makes the object of `argument`."""
        self._object = pkgutil.resolve_name(factory)(argument)
        self._stopping = False

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the object, or of one that it has, as `jobs.get`."""
        return attrgetter(name)(self._object)(*args, **options)

    def stop(self) -> None:
        """Ask the processes to make way, after a checkpoint."""
        self._stopping = True

    def stopping(self) -> bool:
        """Whether they are to make way."""
        return self._stopping


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place in its team."""

    rank: int
    node: str
    """The address of its node."""
    folder: Path
    """The job's, on storage that all nodes share."""
    mark: str
    """The content of the head's file there."""
    _call: Callable[..., Any]
    """Calls a method of the desk by its name. Raises HeadLost."""

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method on the head, as `Desk.call`. Raises its errors, and HeadLost."""
        return self._call("call", name, *args, **options)

    def stopping(self) -> bool:
        """Whether the team is to make way. Raises HeadLost."""
        return bool(self._call("stopping"))

    def require_shared(self) -> None:
        """Raise StoreError where the job's folder on this node is not that of the head, or takes no locks."""
        path = self.folder / MARK
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
        elif locked_by(lock) is None:
            problem = "is shared without file locks, so that two teams could write at once"
        if problem is not None:
            raise StoreError(
                f"{self.folder} on node {self.node} {problem}; keep the run folder, or the server's "
                "--data-dir, on storage that all nodes mount at the same path, with file locks, as NFS 4 has "
                "them"
            )

    def lock(self, team: Team) -> RunLock:
        """This process's lock, for as long as it trains, so that of two teams one writes. All processes of a
        team must ask together.

        Raises PeerLost where a process of an earlier team does not end.
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
"""Begins the line that says why."""

_CAUSE = re.compile(rf"^{re.escape(CAUSE)}(.+)$", re.MULTILINE)


class RayTeams(BaseModel, frozen=True):
    """Starts the processes of a team as actors of Ray's.

    The command is a process on this machine, a node of the cluster, and holds the lock of the job's folder.
    When it ends, however that comes about, Ray ends the others.
    """

    config: RayConfig
    desk: str
    """The import path of what makes the object on the head that the processes call, of the last argument."""
    on_gpus: bool
    """Whether each process is to have a GPU, where the cluster has any."""
    code: Path | None = None
    """The current folder of the processes, with modules of the user's."""

    def model_post_init(self, context: Any) -> None:
        """Raises MissingExtraError, RequestError."""
        require_ray(self.config.address)

    def command(self, module: str, arguments: Sequence[str], processes: int, folder: Path) -> list[str]:
        """The command that starts the processes once, as many as the cluster has room for in between."""
        asked = {"module": module, "arguments": tuple(arguments), "processes": processes, "folder": folder}
        order = TeamOrder(**dict(self), **asked)
        # Everyone on this machine can read a command line, and this file only its user.
        descriptor, path = tempfile.mkstemp(prefix="etude-team-", suffix=".json")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(order.model_dump_json())
        return [sys.executable, "-m", "etude.cluster.team", path]

    def first_failure(self, log: str) -> str | None:
        """As the command has written it."""
        causes = _CAUSE.findall(log)
        return str(causes[-1]) if causes else None


class TeamOrder(RayTeams):
    """The team to start. Its runtime environment may have secrets, which are for Ray alone."""

    module: str
    """Its `main` is called in every process, with the process's seat and the `arguments`."""
    arguments: tuple[str, ...]
    processes: int
    folder: Path
    """The job's, on storage that all nodes share."""


_CALL_SECONDS = 120.0
"""That the head has for an answer."""


class Part:
    """Runs the module of an order."""

    def address(self) -> tuple[str, int]:
        """Where others find this process: its node, and a port that is free there."""
        import ray

        node = str(ray.util.get_node_ip_address())
        with socket.socket() as listening:
            listening.bind(("", 0))
            return node, int(listening.getsockname()[1])

    def run(self, order: TeamOrder, desk: Any, mark: str, rank: int, first: tuple[str, int]) -> None:
        """Do this process's part in a team, whose first process is at `first`. Raises EtudeError."""
        node, _ = self.address()
        # As a launcher of torch's would. Ray shows each process its own devices, so that it is the only one.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(order.processes)}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": first[0], "MASTER_PORT": str(first[1])}
        seat = Seat(rank, node, order.folder, mark, _line_to(desk))
        if importlib.import_module(order.module).main(seat, *order.arguments):
            raise EtudeError(f"process {rank} on {node} has not done its part; the log says why")


def _line_to(desk: Any) -> Any:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    def call(name: str, *args: Any, **options: Any) -> Any:
        try:
            return ray.get(getattr(desk, name).remote(*args, **options), timeout=_CALL_SECONDS)
        except RayTaskError as error:
            raise error.cause from error
        except (RayActorError, GetTimeoutError) as error:
            raise HeadLost(
                "the process on the head that started this one ended, or does not answer"
            ) from error

    return call
