"""The servers of an environment while it is played, and the one that brings its calls to Etude."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import runtime_is_local

from etude.config.import_path import where_raised
from etude.core.errors import EnvironmentAway
from etude.integrations.verifiers.client import EpisodeClientConfig

STOP_SECONDS = 30.0
"""Seconds that an environment may take to stop; it is cancelled then, and gets as long again."""

_LOG = logging.getLogger("etude.integrations.verifiers")


class RecordingServer(InterceptionServer):
    """verifiers' own server of a rollout's model calls; those of an episode's models stay in this process."""

    def register(self, session: Any) -> tuple[str, str]:
        """Take a rollout on. Its client is the episode's, unless its agent has an endpoint of its own."""
        secrets: tuple[str, str] = super().register(session)
        config = session.ctx.client
        if isinstance(config, EpisodeClientConfig):
            session.client = config.client(session.trace.agent.name)
        return secrets


@asynccontextmanager
async def serving(env: Any) -> AsyncIterator[None]:
    """`env.serving()` with a server of Etude's; shared tool servers and hooks are the environment's."""
    async with env.shared_tools() as shared:
        local = all(runtime_is_local(spec.runtime) for spec in env._agent_specs.values())
        secrets = tuple(server.state_secret for server in shared.values() if server.state_secret)
        async with RecordingServer(requires_tunnel=not local, state_service_secrets=secrets) as server:
            env._shared_tools, env._interception = shared, server
            try:
                await env.start()
                yield
            finally:
                try:
                    await env.stop()
                finally:
                    env._shared_tools, env._interception = {}, None


class Servers:
    """Starts what an environment needs with the first episode, so that a check of the config starts nothing.

    One task starts and stops it: some of what is within must be left by the task that entered it.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._over = asyncio.Event()

    async def start(self) -> None:
        """Have everything ready; quick when it is. Raises EnvironmentAway when it did not start."""
        if self._task is None or self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._serve(self._ready))
        await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Stop it. Calling it twice is fine.

        What has been played counts all the same: an environment that does not stop is named in the log, and
        left to itself.
        """
        self._over.set()
        task, self._task = self._task, None
        if task is None:
            return
        stopped, _ = await asyncio.wait([task], timeout=STOP_SECONDS)
        if not stopped:
            task.cancel()
            await asyncio.wait([task], timeout=STOP_SECONDS)
            reason = f"it took longer than {STOP_SECONDS:g} s"
        elif task.cancelled() or (error := task.exception()) is None:
            return
        else:
            reason = where_raised(error)
        _LOG.warning("environment '%s' did not stop: %s", self._env.config.env_id, reason)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with serving(self._env):
                ready.set_result(None)
                await self._over.wait()
        except Exception as error:
            if ready.done():
                raise
            reason = f"{type(error).__name__}: {error}"
            ready.set_exception(
                EnvironmentAway(f"what the environment needs did not start: {reason}. See: etude check")
            )
