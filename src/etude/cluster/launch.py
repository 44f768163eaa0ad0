"""The launcher of teams whose processes are on the nodes of a Ray cluster."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from etude.cluster.config import LearnersConfig
from etude.core.errors import MissingExtraError, RequestError

CAUSE = "the team has ended: "
"""Begins the line that says why."""

_CAUSE = re.compile(rf"^{re.escape(CAUSE)}(.+)$", re.MULTILINE)


class TeamOrder(BaseModel):
    """The team to start. It is on a command line, and has no secrets."""

    model_config = ConfigDict(frozen=True)

    config: LearnersConfig
    on_gpus: bool
    """Whether each process is to have a GPU, where the cluster has any."""
    module: str
    """Its `main` is run in every process, with `arguments` on the command line."""
    arguments: tuple[str, ...]
    processes: int
    folder: Path
    """The job's, on storage that all nodes share."""
    desk: str
    """The import path of what makes the object on the head that the processes call, of the last argument."""


class RayLauncher:
    """Starts the processes of a team as actors of Ray's.

    The command is a process on this machine, a node of the cluster, and holds the lock of the job's folder.
    When it ends, however that comes about, Ray ends the others.
    """

    def __init__(self, config: LearnersConfig, desk: str, *, on_gpus: bool) -> None:
        """Raises MissingExtraError without Ray, RequestError for an address that is not of this kind."""
        if find_spec("ray") is None:
            raise MissingExtraError("training on a Ray cluster", "ray")
        if config.address.startswith("ray://"):
            raise RequestError(
                f"{config.address} is an address for Ray's client, and to start processes that train this "
                "machine must be a node of the cluster: `ray start --address=HOST:6379 --num-cpus=0` makes "
                "it one that runs nothing else, and the address is then `auto`"
            )
        self._config = config
        self._desk = desk
        self._on_gpus = on_gpus

    def command(self, module: str, arguments: Sequence[str], processes: int, folder: Path) -> list[str]:
        """The command that starts the processes, as many as the cluster has room for in between."""
        order = TeamOrder(
            config=self._config,
            on_gpus=self._on_gpus,
            module=module,
            arguments=tuple(arguments),
            processes=processes,
            folder=folder,
            desk=self._desk,
        )
        return [sys.executable, "-m", "etude.cluster.team", order.model_dump_json()]

    def first_failure(self, log: str) -> str | None:
        """As the command has written it."""
        causes = _CAUSE.findall(log)
        return str(causes[-1]) if causes else None
