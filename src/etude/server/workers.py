"""Worker processes. One is kept ready, so that no job waits for torch and transformers to be loaded."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping

from etude.learner.team import launch_command
from etude.server.job_folder import JobFolder
from etude.server.worker import WorkerOrder

_MODULE = "etude.server.worker"
_GRACE_SECONDS = 5.0


class Workers:
    """Starts the workers of jobs. Each is in a session of its own: Ctrl-C is for the server."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` is that of the workers."""
        self._environment = dict(environment)
        self._spare: Process | None = None

    async def start(self, order: WorkerOrder) -> Process:
        """A process that trains the job, or launches those that do. Raises OSError when there is none."""
        folder = JobFolder(order.data_dir, order.job)
        folder.path.mkdir(parents=True, exist_ok=True)
        if order.processes > 1:
            command = launch_command(_MODULE, [order.model_dump_json()], order.processes)
            with folder.log.open("ab") as log:
                return await self._spawn(command, stdin=DEVNULL, stdout=log, stderr=log)
        worker, self._spare = self._spare, None
        if worker is None or worker.returncode is not None:
            worker = await self._untold()
        await _tell(worker, order.model_dump_json())
        with contextlib.suppress(OSError):  # There is none to spare then, and the next job has to wait.
            self._spare = await self._untold()
        return worker

    async def close(self) -> None:
        """End the worker that has no job."""
        spare, self._spare = self._spare, None
        if spare is None or spare.returncode is not None:
            return
        assert spare.stdin is not None
        spare.stdin.close()
        try:
            await asyncio.wait_for(spare.wait(), _GRACE_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                spare.kill()

    async def _untold(self) -> Process:
        """A process that makes itself ready, and waits for an order."""
        return await self._spawn([sys.executable, "-m", _MODULE], stdin=PIPE, stdout=DEVNULL, stderr=None)

    async def _spawn(self, command: list[str], **streams: object) -> Process:
        return await asyncio.create_subprocess_exec(
            *command,
            start_new_session=True,
            env=self._environment,
            **streams,  # type: ignore[arg-type]
        )


async def _tell(worker: Process, order: str) -> None:
    """Hand over the order. A worker that ended meanwhile is noticed by its exit code."""
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.stdin.write(order.encode() + b"\n")
        await worker.stdin.drain()
    worker.stdin.close()
