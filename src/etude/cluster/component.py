"""The component behind `cluster: {_type: ray}`, and runners on the nodes: an actor keeps each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cluster.launch import RayConfig, TeamLauncher, connected, require_ray
from etude.config.document import dotted
from etude.config.load import secrets_of
from etude.config.registry import register_cluster
from etude.config.schema import Config
from etude.core.errors import EtudeError, RequestError, first_line
from etude.inference.child_process import MaskedLines, last_lines
from etude.runners.pool import LOGS
from etude.runners.process import Cluster, Invitation, ProcessEnd, start_runner
from etude.store.files import open_private, private_folder

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.config.component import ClusterConfig
    from etude.config.schema import Config


_LOG_SECONDS = 0.5
"""Between two looks at the output of a runner."""
_PIECE_BYTES = 64_000
"""Of its output at once: a short answer goes from process to process, and not into the object store."""
_LOST_SECONDS = 5.0
"""For the end of an actor that was killed to be told."""


class Keeper:
    """An actor: starts a runner on its node, and says what it prints and how it ended."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  without a name: it is gone with us

    async def node(self) -> str:
        """The address of its node."""
        import ray

        return str(ray.util.get_node_ip_address())

    async def keep(self, invitation: list[Any]) -> tuple[str, bool]:
        """Start a runner and wait for its end: how it ended, and whether others killed it."""
        process = await start_runner(Invitation(*invitation), self._output.fileno(), Path(os.devnull))
        end = await process.ended()
        return end.how, end.by_others

    async def output(self, start: int) -> bytes:
        """The next piece of what the runner has printed, from a byte on; nothing where there is none."""
        return os.pread(self._output.fileno(), _PIECE_BYTES, start)


class RayProcess:
    """A runner on some node."""

    def __init__(self, actor: Any, end: Any, log: Path) -> None:
        self._actor = actor
        self._killed, self._ended = asyncio.Event(), asyncio.Event()
        self._end = asyncio.ensure_future(self._wait(asyncio.ensure_future(end)))
        self._path, self._lines, self._taken = log, MaskedLines(), 0
        self.log = str(log)
        self.node = ""
        self._following = asyncio.ensure_future(self._follow())

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
        self._ended.set()
        if not end.done():
            end.cancel()
            self._following.cancel()
            return ProcessEnd("was lost with its node", is_lost=True)
        try:
            how, by_others = end.result()
        except ray.exceptions.RayError as error:
            reason = first_line(error)
            if isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed:
                return ProcessEnd(f"was lost with its actor: {reason}", is_lost=True)
            return ProcessEnd(f"has no actor: {reason}")
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(_LOST_SECONDS):
                await self._following
                await self._fetch()
        with contextlib.suppress(OSError), open_private(self._path, "ab") as file:
            file.write(self._lines.end())
        ray.kill(self._actor)
        return ProcessEnd(how, by_others)

    async def _follow(self) -> None:
        """Write down where it is, and what it prints, for as long as its actor lives."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            self.node = await self._actor.node.remote()
            while not self._ended.is_set():
                await self._fetch()
                await asyncio.sleep(_LOG_SECONDS)

    async def _fetch(self) -> None:
        while piece := await self._actor.output.remote(self._taken):
            self._taken += len(piece)
            # A full disk is told of by the journal.
            with contextlib.suppress(OSError), open_private(self._path, "ab") as file:
                file.write(self._lines.add(piece))

    def kill(self) -> None:
        """Kill the actor, whose end ends the runner."""
        import ray

        if not self._end.done():
            ray.kill(self._actor)
            self._killed.set()

    def last_words(self) -> str:
        """The end of what it has printed, where that came here."""
        return last_lines(self._path)


class RunnerLauncher:
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

        private_folder(self._logs)
        try:
            actor: Any = ray.remote(Keeper).options(**self._options).remote()
            # A short argument goes from process to process, and not into the object store.
            end = actor.keep.remote([invitation.address, invitation.number, invitation.key])
        except (ray.exceptions.RayError, ValueError, TypeError) as error:
            raise EtudeError(f"Ray cannot start a runner: {error}; look at the keys of `cluster`") from error
        return RayProcess(actor, end, self._logs / f"{place}.log")


@register_cluster(config_type=RayConfig)
async def ray_cluster(config: RayConfig, builder: Builder) -> AsyncIterator[Cluster]:
    """Places runners and learners on a cluster. Raises RequestError where there is none."""
    if builder.run is None:
        raise RequestError("processes on a cluster need a run folder")
    require_ray(config.address)
    _require_no_secrets(builder.config)
    require_used(config, builder.config)
    file = builder.config.finetuning.run_configuration.config_file
    # The folder that goes along: that of the config file, or the current one.
    folder = (file.parent if file is not None else Path()).absolute()
    learners = partial(TeamLauncher, config, code=folder) if config.learners else None
    async with contextlib.AsyncExitStack() as exits:
        runners = dashboard = None
        if config.runners:
            connection = connected(config.address, config.runtime_env, folder)
            # In a thread: in the main one Ray would take SIGTERM for itself.
            dashboard = await asyncio.to_thread(connection.__enter__)
            exits.push_async_callback(asyncio.to_thread, connection.__exit__, None, None, None)
            runners = RunnerLauncher(config, builder.run.path / LOGS)
        yield Cluster(runners, dashboard, learners)


def _require_no_secrets(config: Config) -> None:
    """Raise RequestError for secrets in Ray's runtime environment, and what comes from the environment there.

    Ray keeps runtime environments in its head, and writes them into its logs.
    """
    for path, text in config._as_written.items():
        is_sent = path[:2] == ("cluster", "runtime_env") and path[2] not in ("working_dir", "py_modules")
        if is_sent and "$" in text:
            raise RequestError(
                f"{dotted(path)} comes from the environment ({text}), and Ray writes runtime environments "
                "into its logs for everybody to read; set the variable on every node before `ray start`"
            )
    for path in secrets_of(config, config.model_dump(mode="json", fallback=str), sure=True):
        if path[:2] == ("cluster", "runtime_env"):
            raise RequestError(
                f"{dotted(path)} is a secret, and Ray writes runtime environments into its logs for "
                "everybody to read; set the variable on every node before `ray start`"
            )


def require_used(cluster: ClusterConfig, config: Config) -> None:
    """Raise RequestError for learners where nothing is trained that they could train."""
    kinds = [adapter.type_name for adapter in config.trainer_adapters.values()]
    if cluster.learners is not None and config.finetuning.enabled and "local" not in kinds:
        raise RequestError(
            f"cluster.learners train for the adapter 'local', and the config has {', '.join(kinds)}: leave "
            "them out, or set `trainer_adapters: {local: {_type: local}}`"
        )
