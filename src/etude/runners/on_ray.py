"""Runners on the nodes of a Ray cluster: on each node that has one, an actor starts and watches its process.

It is the same program as on one machine, and calls the head. The actor's death, with its node's, ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from etude.config.component import ClusterConfig
from etude.config.registry import register_cluster
from etude.core.errors import EtudeError, MissingExtraError, RequestError
from etude.runners.process import LocalLauncher, LocalProcess, ProcessEnd
from etude.runners.program import Invitation

if TYPE_CHECKING:
    from etude.config.builder import Builder

LOGS = "runners"
"""The folder of the runners' logs in a run folder."""

_LOG_CHARACTERS = 200_000
_LOST_SECONDS = 5.0
"""For the end of an actor that was killed to be told."""
_LEFT_OUT = ["runs", ".git", ".venv", "node_modules", "**/__pycache__"]
"""Of the folder that goes along."""


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
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of the runners. Left out, the config's folder goes along as `working_dir`, so
    that modules beside the config are found."""

    @property
    def wants(self) -> dict[str, float]:
        """The resources for each runner, by Ray's names."""
        wants = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in wants.items() if amount}

    def check(self, folder: Path) -> str:
        """Where the runners would be placed. Raises EtudeError for what is missing."""
        with connected(self, folder):
            import ray

            nodes = [node for node in ray.nodes() if node["Alive"]]
        rooms = [_room(node["Resources"], self.wants) for node in nodes]
        if sum(rooms) < self.runners:
            wants = ", ".join(f"{name}: {amount:g}" for name, amount in self.wants.items())
            raise EtudeError(
                f"there is room for {sum(rooms)} of {self.runners} runners with {{{wants}}} on "
                f"{len(nodes)} nodes; ask for fewer, or start more nodes: ray start --address=…"
            )
        places = ", ".join(
            f"{node['NodeManagerAddress']} (room for {room})" for node, room in zip(nodes, rooms, strict=True)
        )
        return f"{self.runners} runners on {len(nodes)} nodes of Ray: {places}"


def _room(has: dict[str, float], wants: dict[str, float]) -> int:
    """How many runners a node has room for."""
    return min((int(has.get(name, 0) / amount) for name, amount in wants.items()), default=10**6)


@contextlib.contextmanager
def connected(config: RayConfig, folder: Path) -> Iterator[None]:
    """Within the block this process is connected with the cluster, to whose nodes `folder` goes along.

    Raises MissingExtraError, RequestError.
    """
    if find_spec("ray") is None:
        raise MissingExtraError("a Ray cluster", "ray")
    if config.address.startswith("ray://"):
        raise RequestError(
            f"{config.address} is an address for Ray's client, and runners call the process that starts "
            "them: this machine must be a node of the cluster. `ray start --address=HOST:6379 --num-cpus=0` "
            "makes it one that runs nothing else, and the address is then `auto`"
        )
    import ray

    if ray.is_initialized():
        yield
        return
    # Files can only go along with the whole connection.
    environment = {"working_dir": str(folder), "excludes": _LEFT_OUT} | config.runtime_env
    try:
        ray.init(
            address=config.address, log_to_driver=False, configure_logging=False, runtime_env=environment
        )
    except ConnectionError as error:
        raise RequestError(
            f"there is no Ray cluster at '{config.address}': {error}. Start one: ray start --head"
        ) from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError(
            f"Ray cannot send '{folder}' to its nodes: {error}\nName what is to go along: "
            "`cluster: {runtime_env: {working_dir: …, excludes: […]}}`"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


class Keeper:
    """An actor: starts a runner on its node, and says how it ended."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="etude-runner-"))
        self._process: LocalProcess | None = None

    async def keep(self, invitation: list[Any], place: int) -> tuple[str, bool, str]:
        """Start a runner and wait for its end: how it ended, whether others killed it, and its log."""
        self._process = await LocalLauncher(self._folder).launch(Invitation(*invitation), place)
        end = await self._process.ended()
        with contextlib.suppress(OSError):
            log = (self._folder / f"{place}.log").read_text(encoding="utf-8", errors="replace")
            return end.how, end.by_others, log[-_LOG_CHARACTERS:]
        return end.how, end.by_others, ""

    async def memory(self) -> float:
        """Gigabytes that the runner uses."""
        return 0.0 if self._process is None else self._process.memory()


class RayProcess:
    """A runner on some node."""

    def __init__(self, actor: Any, end: Any, log: Path) -> None:
        self._actor = actor
        self._killed = asyncio.Event()
        self._end = asyncio.ensure_future(self._wait(asyncio.ensure_future(_awaited(end))))
        self._path = log
        self._memory = 0.0
        self._asking: asyncio.Task[None] | None = None
        self.log = str(log)

    async def ended(self) -> ProcessEnd:
        """Wait until it has ended, or its actor has."""
        return await asyncio.shield(self._end)

    async def _wait(self, end: asyncio.Future[Any]) -> ProcessEnd:
        import ray

        killed = asyncio.ensure_future(self._killed.wait())
        await asyncio.wait({end, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        # Ray may take a minute to see that a node is gone, and nothing is to be waited for there.
        await asyncio.wait({end}, timeout=_LOST_SECONDS)
        if not end.done():
            end.cancel()
            return ProcessEnd("was lost with its node", is_lost=True)
        try:
            how, by_others, log = end.result()
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()
            return ProcessEnd(f"was lost with its actor: {reason[0] if reason else error!r}", is_lost=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(log)
        ray.kill(self._actor)
        return ProcessEnd(how, by_others)

    def kill(self) -> None:
        """Kill the actor, whose end ends the runner."""
        import ray

        if not self._end.done():
            ray.kill(self._actor)
            self._killed.set()

    def memory(self) -> float:
        """Gigabytes that it used when it was last asked."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        return self._memory

    async def _ask(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            self._memory = await self._actor.memory.remote()

    def last_words(self) -> str:
        """The end of what it has printed, where that came here."""
        with contextlib.suppress(OSError):
            return "\n".join(self._path.read_text(encoding="utf-8").splitlines()[-12:])
        return ""


async def _awaited(reference: Any) -> Any:
    return await reference


class RayLauncher:
    """Places runners on the nodes of a cluster."""

    def __init__(self, config: RayConfig, logs: Path) -> None:
        """The runners' logs come back to `logs` when they end."""
        import ray

        self._config = config
        self._logs = logs
        self.address = str(ray.util.get_node_ip_address())
        self._options = {
            "num_cpus": config.num_cpus,
            "num_gpus": config.num_gpus,
            "resources": config.resources or None,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
        }

    async def launch(self, invitation: Invitation, place: int) -> RayProcess:
        """Start a runner on a node that has room. Raises EtudeError for resources that Ray does not take."""
        import ray

        self._logs.mkdir(exist_ok=True)
        try:
            actor: Any = ray.remote(Keeper).options(**self._options).remote()
            # A short argument goes from process to process, and not into the object store.
            end = actor.keep.remote([invitation.address, invitation.number, invitation.key], place)
        except (ray.exceptions.RayError, ValueError, TypeError) as error:
            raise EtudeError(f"Ray cannot start a runner: {error}; look at the keys of `cluster`") from error
        return RayProcess(actor, end, self._logs / f"{place}.log")


@register_cluster(config_type=RayConfig)
async def ray_cluster(config: RayConfig, builder: Builder) -> AsyncIterator[RayLauncher]:
    """Places runners on a cluster. Raises RequestError where there is none."""
    if builder.run is None:
        raise RequestError("runners on a cluster need a run folder")
    connection = connected(config, folder_of(builder))
    # In a thread: in the main one Ray would take SIGTERM for itself.
    await asyncio.to_thread(connection.__enter__)
    try:
        yield RayLauncher(config, builder.run.path / LOGS)
    finally:
        await asyncio.to_thread(connection.__exit__, None, None, None)


def folder_of(builder: Builder) -> Path:
    """The folder that goes along: that of the config file, or the current one."""
    file = builder.config.finetuning.run_configuration.config_file
    return (file.parent if file is not None else Path()).absolute()
