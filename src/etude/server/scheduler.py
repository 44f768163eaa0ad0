"""The scheduler: takes jobs from the queue, starts a worker process for each, and handles its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from etude.backends.lm_client import FREE_ENGINE
from etude.engines.child_process import exit_words, last_lines
from etude.models.source import local_path
from etude.processes.team import MemberProgram, Places, TeamRun, local_places
from etude.server import worker
from etude.server.database import Row
from etude.server.engines import JOBS, EnginePool
from etude.server.jobs import LIVE, JobFolder
from etude.server.settings import ServerSettings, WorkerOrder, training_processes
from etude.store.files import private_folder

_LOG = logging.getLogger("etude.server")
T = TypeVar("T")

_SLOW_IMPORTS = (
    "peft",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
_ATTEMPTS = 3
"""The number of workers that may end without a checkpoint before their job fails."""
_LOOK_SECONDS = 0.5
_LOG_LINES = 5
_GRACE_SECONDS = 20.0
"""Seconds for a worker to end after its job is cancelled or the server stops."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that trains a job, or a team of them."""

    pid: int
    """0 for a team."""
    end: asyncio.Future[str | None]
    """How it ended. None for a team that did its part."""
    team: TeamRun | None = None


async def start_worker(order: WorkerOrder, places: Places, stores: worker.Stores) -> Worker:
    """Start a process that trains the job, or a team of several. Raises OSError if it cannot start.

    Each has its own session, so that Ctrl-C reaches only the server. It ends with the server.
    """
    settings, folder = order.settings, JobFolder(order.settings.data_dir, order.job)
    private_folder(folder.path)
    loop = asyncio.get_running_loop()
    if settings.training_processes != 1 or settings.cluster is not None:
        program = MemberProgram(worker.__name__, (order.model_dump_json(),), folder.path)
        desk = None if settings.cluster is None else stores
        team = TeamRun(places, program, settings.training_processes or 1, folder.log, desk)
        return Worker(0, loop.create_task(team.ended()), team)
    # The fork server has done the slow imports. On other systems, libraries may break in a fork.
    forks, spawns = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
    forks.set_forkserver_preload([worker.__name__, *_SLOW_IMPORTS])
    kind = forks.Process if sys.platform == "linux" else spawns.Process
    process = kind(target=worker.train_forked, args=[order.model_dump_json()])
    await asyncio.to_thread(process.start)
    ended: asyncio.Future[str | None] = loop.create_future()

    def end() -> None:
        loop.remove_reader(process.sentinel)
        ended.set_result(exit_words(process.exitcode or 0))

    loop.add_reader(process.sentinel, end)
    return Worker(process.pid or 0, ended)


class Scheduler:
    """The scheduler of up to `running_jobs` workers. Everything that must survive it is in the database.

    If the server is killed, each worker notices it and ends with a checkpoint after its current step. A
    worker holds its job's lock until it ends, so the next server waits for it instead of starting another.
    """

    def __init__(self, settings: ServerSettings, stores: worker.Stores, pool: EnginePool) -> None:
        self._settings = settings
        own = {"data_dir": settings.data_dir.absolute(), "training_processes": training_processes(settings)}
        if (folder := local_path(settings.model)) is not None:
            own["model"] = str(folder.absolute())
        self._workers_settings = settings.model_copy(update={**own, "api_key": None, "vllm_args": ()})
        self._stores, self._jobs = stores, stores.jobs
        self._pool = pool
        self._places = places_for(settings)
        self._endings: set[asyncio.Future[None]] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._workers_of: dict[str, Worker] = {}
        """The workers that this server has started, by job."""
        self._engine_away_for: set[str] = set()
        """The jobs that stopped the engine, until it is back."""
        self._is_stopping = False
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take over the jobs of earlier servers, then process the queue."""
        self._loop = asyncio.get_running_loop()
        self._main = self._loop.create_task(self._run())

    def wake(self) -> None:
        """Look at the queue now. Can be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def stop(self) -> None:
        """Ask the workers to write checkpoints and end. Their jobs return to the queue."""
        if self._main is not None:
            self._main.cancel()
        self._is_stopping = True
        for job in self._tasks:
            self._send(job, signal.SIGTERM)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_GRACE_SECONDS)
            for job in self._tasks:
                self._send(job, signal.SIGKILL)

    def _send(self, job: str, number: signal.Signals) -> None:
        """Send a signal to a job's worker, even if an earlier server started it.

        Other signals go to one process, which tells the rest. SIGKILL goes to all of them.
        """
        started = self._workers_of.get(job)
        if started is not None and started.team is not None:
            seconds = 0.0 if number == signal.SIGKILL else _GRACE_SECONDS
            ending = asyncio.ensure_future(started.team.end(seconds))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            return
        processes = [*([] if started is None else [started.pid]), *self._folder(job).holders()]
        for process in processes if number == signal.SIGKILL else processes[:1]:
            with contextlib.suppress(ProcessLookupError):
                # The lock's holder may not have written its pid yet. Pid 0 would be this process's group.
                if process:
                    os.kill(process, number)

    def _folder(self, job: str) -> JobFolder:
        return JobFolder(self._settings.data_dir, job)

    async def _run(self) -> None:
        taken_up = False
        while True:
            self._woken.clear()
            try:
                if not taken_up:
                    for job in await asyncio.to_thread(self._jobs.with_status, "running"):
                        await self._make_room(job)
                        self._add(job["id"], self._wait_for_orphan(job["id"]))
                    taken_up = True
                await self._take_from_queue()
                # The engine is back once no job needs the device.
                if self._engine_away_for and not self._engine_away_for & self._tasks.keys():
                    await self._pool.start(JOBS)
                    self._engine_away_for.clear()
            except Exception:  # noqa: BLE001  a full disk today must not end the queue for good
                _LOG.exception("the queue of jobs could not be read; the server will try again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5 * _LOOK_SECONDS):
                    await self._woken.wait()

    async def _take_from_queue(self) -> None:
        for job in await asyncio.to_thread(self._jobs.with_status, "queued"):
            if len(self._tasks) >= self._settings.running_jobs:
                return
            if job["id"] in self._tasks or not await asyncio.to_thread(self._jobs.start, job["id"]):
                continue
            await self._make_room(job)
            self._add(job["id"], self._work(job["id"]))

    async def _make_room(self, job: Row) -> None:
        if self._settings.stop_engine_for_jobs or job["metadata"].get(FREE_ENGINE) == "true":
            self._engine_away_for.add(job["id"])
            await self._pool.stop(JOBS)

    def _add(self, job: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[job] = task
        task.add_done_callback(lambda done: self._handle_end(job, done))

    def _handle_end(self, job: str, task: asyncio.Task[None]) -> None:
        del self._tasks[job]
        self._woken.set()
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("the scheduler failed on job %s", job, exc_info=task.exception())

    async def _work(self, job: str) -> None:
        order = WorkerOrder(job=job, settings=self._workers_settings)
        self._workers_of[job] = started = await start_worker(order, self._places, self._stores)
        if self._is_stopping:
            self._send(job, signal.SIGTERM)
        try:
            how = await self._wait(job, started.end) or exit_words(0)
        finally:
            self._workers_of.pop(job, None)
        await self._settle(job, how, counts=not self._is_stopping)

    async def _wait_for_orphan(self, job: str) -> None:
        """Wait for a job that an earlier server started. Its worker may still run."""

        async def locks_free() -> None:
            while await asyncio.to_thread(self._folder(job).holders):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)  # Children of another server send no events.

        await self._wait(job, asyncio.ensure_future(locks_free()))
        # The job is not at fault: frequent restarts of the machine must not fail it.
        await self._settle(job, "the server was stopped", counts=False)

    async def _wait(self, job: str, end: asyncio.Future[T]) -> T:
        """Return how the worker ended. Kill a worker that continues too long after its job has ended.

        A paused job's worker may take its time, because it ends after its current step.
        """
        deadline: float | None = None
        while True:
            await asyncio.wait({end}, timeout=_LOOK_SECONDS)
            if end.done():
                return end.result()
            if (await asyncio.to_thread(self._jobs.get, job))["status"] in LIVE:
                continue
            deadline = deadline or time.monotonic() + _GRACE_SECONDS
            if time.monotonic() > deadline:
                self._send(job, signal.SIGKILL)

    async def _settle(self, job: str, how: str, *, counts: bool = True) -> None:
        """Handle a worker's end: its job has ended, is queued again, or fails."""
        row = await asyncio.to_thread(self._jobs.get, job)
        folder = self._folder(job)
        if row["status"] == "paused":
            step = folder.checkpoints.newest()
            at = f"after step {step}" if step else "before its first step"
            await asyncio.to_thread(self._jobs.add_event, job, f"The worker has ended {at}", once="paused")
        if row["status"] != "running":
            return
        if await asyncio.to_thread(folder.holders):
            await self._wait_for_orphan(job)
        elif counts and row["attempts"] >= _ATTEMPTS:
            log = last_lines(folder.log, _LOG_LINES).replace("\n", " | ")
            reason = f"its worker ended {_ATTEMPTS} times without a checkpoint ({how}); {log}"
            await asyncio.to_thread(self._jobs.fail, job, reason.rstrip("; "), "worker_crashed")
        else:
            step = folder.checkpoints.newest()
            start = f"from step {step}" if step else "from its start"
            event = f"The worker ended early ({how}); the job continues {start}"
            attempts = row["attempts"] if counts else 0
            await asyncio.to_thread(self._jobs.requeue, job, event, attempts)


def places_for(settings: ServerSettings) -> Places:
    """Return the places of training processes, local or on Ray. Raises MissingExtraError, RequestError."""
    if settings.cluster is None:
        return local_places
    from etude.processes.ray_cluster import ray_places, require_ray

    require_ray(settings.cluster.address)
    # Workers import custom algorithms from the server's current folder.
    code = Path.cwd() if settings.algorithms else None
    return partial(ray_places, config=settings.cluster, on_gpus=settings.device != "cpu", code=code)
