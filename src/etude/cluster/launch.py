"""Teams whose processes are on the nodes of a Ray cluster: the launcher, and each process with its place.

A database of the head is nothing that other machines can open. Whoever starts the team puts an object there,
behind a desk, and processes on any node call its methods.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from etude.cluster.config import RayConfig, require_ray
from etude.core.errors import EtudeError, StoreError
from etude.store.run_folder import RunLock, locked_by

MARK = "shared"
"""A file of the head's in the job's folder: a node that has another one, or none, has another folder."""

_LOCK_SECONDS = 60.0
"""In which a process of an earlier team ends, whose launcher was killed."""
_LOCK_PAUSE_SECONDS = 0.2


class HeadLost(EtudeError):
    """The process on the head that started this one has ended: nobody can be told what it does."""


class Desk:
    """An object on the head, whose methods are called from all nodes."""

    def __init__(self, factory: str, argument: str) -> None:
        """`factory` is the import path of what makes the object of `argument`."""
        self._object = pkgutil.resolve_name(factory)(argument)
        self._stopping = False

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name} is not for others to call")
        return getattr(self._object, name)(*args, **options)

    def stop(self) -> None:
        """Ask the processes to make way, after a checkpoint."""
        self._stopping = True

    def stopping(self) -> bool:
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
        """Call a method of the object on the head. Raises its errors, and HeadLost."""
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

    def lock(self, *, leads: bool) -> RunLock | None:
        """Held by a process for as long as it lives, so that of two teams one writes.

        None where a process of another team that `leads` as this one does not end.
        """
        end = time.monotonic() + _LOCK_SECONDS
        path = self.folder / ("leader" if leads else f"member-{self.rank}")
        while time.monotonic() < end:
            with suppress(StoreError):
                return RunLock(path)
            time.sleep(_LOCK_PAUSE_SECONDS)
        return None


CAUSE = "the team has ended: "
"""Begins the line that says why."""

_CAUSE = re.compile(rf"^{re.escape(CAUSE)}(.+)$", re.MULTILINE)


class TeamOrder(BaseModel):
    """The team to start. Its runtime environment may have secrets, which are for Ray alone."""

    model_config = ConfigDict(frozen=True)

    config: RayConfig
    on_gpus: bool
    """Whether each process is to have a GPU, where the cluster has any."""
    module: str
    """Its `main` is called in every process, with the process's seat and the `arguments`."""
    arguments: tuple[str, ...]
    processes: int
    folder: Path
    """The job's, on storage that all nodes share."""
    desk: str
    """The import path of what makes the object on the head that the processes call, of the last argument."""
    code: Path | None
    """The current folder of the processes, with modules of the user's."""


class TeamLauncher:
    """Starts the processes of a team as actors of Ray's.

    The command is a process on this machine, a node of the cluster, and holds the lock of the job's folder.
    When it ends, however that comes about, Ray ends the others.
    """

    def __init__(self, config: RayConfig, desk: str, *, on_gpus: bool, code: Path | None = None) -> None:
        """The folder `code`, if any, goes along. Raises MissingExtraError, RequestError."""
        require_ray(config.address)
        self._config = config
        self._desk = desk
        self._on_gpus = on_gpus
        self._code = code

    def command(self, module: str, arguments: Sequence[str], processes: int, folder: Path) -> list[str]:
        """The command that starts the processes once, as many as the cluster has room for in between."""
        order = TeamOrder(
            config=self._config,
            on_gpus=self._on_gpus,
            module=module,
            arguments=tuple(arguments),
            processes=processes,
            folder=folder,
            desk=self._desk,
            code=self._code,
        )
        # Everyone on this machine can read a command line, and this file only its user.
        descriptor, path = tempfile.mkstemp(prefix="etude-team-", suffix=".json")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(order.model_dump_json())
        return [sys.executable, "-m", "etude.cluster.team", path]

    def first_failure(self, log: str) -> str | None:
        causes = _CAUSE.findall(log)
        return str(causes[-1]) if causes else None


_CALL_SECONDS = 120.0
"""That the head has for an answer."""


class PartFailed(EtudeError):
    """A process of a team has not done its part, for a reason that its log says."""


class Part:
    """Runs the module of an order."""

    def address(self) -> tuple[str, int]:
        """Where others find this process: its node, and a port that is free there."""
        import ray

        node = str(ray.util.get_node_ip_address())
        with socket.socket() as listening:
            listening.bind(("", 0))
            return node, int(listening.getsockname()[1])

    def run(self, order_text: str, desk: Any, mark: str, rank: int, size: int, first: tuple[str, int]) -> str:
        """Do this process's part in a team of `size`, whose first process is at `first`; its node.

        Raises PartFailed.
        """
        order, (node, _) = TeamOrder.model_validate_json(order_text), self.address()
        # As a launcher of torch's would. Ray shows each process its own devices, so that it is the only one.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": first[0], "MASTER_PORT": str(first[1])}
        seat = Seat(rank, node, order.folder, mark, _line_to(desk))
        if importlib.import_module(order.module).main(seat, *order.arguments):
            raise PartFailed(f"process {rank} on {node} has not done its part; the log says why")
        return node


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
