"""The scheduler: takes jobs from the queue, gives each a worker process, and sees how that ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from etude.backends.lm_client import FREE_ENGINE
from etude.learner.team import launch_command
from etude.server.database import Row
from etude.server.engines import JOBS, EnginePool
from etude.server.job_folder import JobFolder, exit_words
from etude.server.jobs import JobStore
from etude.server.settings import ServerSettings, training_processes
from etude.server.worker import WorkerOrder

_LOG = logging.getLogger("etude.server")

_MODULE = "etude.server.worker"
_ATTEMPTS = 3
"""Workers that may end without a checkpoint before their job is given up."""
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 20.0
"""For a worker to end by itself once its job is cancelled or the server stops."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that trains a job."""

    pid: int
    code: asyncio.Future[int]
    """Its exit code, once it is over; 1 where nobody saw it."""


class Workers:
    """Starts the workers of jobs, each in a session of its own: Ctrl-C is for the server.

    They are forked from a nursery, a process that has imported what takes seconds to import.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` is that of the workers."""
        # With NVML, as CUDA itself could not be used any more after a fork.
        self._environment = {**environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._nursery: Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._starting: deque[asyncio.Future[Worker]] = deque()
        self._closed = False

    async def start(self, order: WorkerOrder) -> Worker | None:
        """A process that trains the job, or launches those that do; None once `close` was called.

        Raises OSError when it cannot be started.
        """
        folder = JobFolder(order.data_dir, order.job)
        folder.path.mkdir(parents=True, exist_ok=True)
        if order.processes > 1:
            command = launch_command(_MODULE, [order.model_dump_json()], order.processes)
            with folder.log.open("ab") as log:
                process = await self._spawn(command, stdin=DEVNULL, stdout=log, stderr=log)
            return Worker(process.pid, asyncio.ensure_future(process.wait()))
        try:
            return await self._fork(order)
        except BrokenPipeError:  # The nursery ended, killed or tired of waiting, before it had the order.
            return None if self._closed else await self._fork(order)

    async def _fork(self, order: WorkerOrder) -> Worker:
        if self._nursery is None or self._nursery.returncode is not None:
            command = [sys.executable, "-m", _MODULE]
            self._nursery = await self._spawn(command, stdin=PIPE, stdout=PIPE, stderr=None)
            self._listener = asyncio.create_task(self._listen(self._nursery))
        worker: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._starting.append(worker)
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(order.model_dump_json().encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # The listener notices.
            await self._nursery.stdin.drain()
        return await worker

    async def _listen(self, nursery: Process) -> None:
        """Note which workers the nursery starts, and how they end."""
        loop = asyncio.get_running_loop()
        running: dict[int, asyncio.Future[int]] = {}
        assert nursery.stdout is not None
        async for line in nursery.stdout:
            pid, *code = map(int, line.split())
            if code:
                running.pop(pid).set_result(code[0])
            else:
                running[pid] = loop.create_future()
                _resolve(self._starting.popleft(), Worker(pid, running[pid]))
        await nursery.wait()
        # Its workers go on. The scheduler finds them by their locks.
        for future in running.values():
            future.set_result(1)
        while self._starting:
            _resolve(self._starting.popleft(), BrokenPipeError("the nursery of the workers has ended"))

    def close(self) -> None:
        """Start no more workers. The nursery ends after those that it has."""
        self._closed = True
        if self._nursery is None or self._nursery.returncode is not None:
            return
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        if self._starting:
            with contextlib.suppress(ProcessLookupError):
                self._nursery.kill()

    async def _spawn(self, command: list[str], **streams: object) -> Process:
        return await asyncio.create_subprocess_exec(
            *command,
            start_new_session=True,
            env=self._environment,
            **streams,  # type: ignore[arg-type]
        )


def _resolve(future: asyncio.Future[Worker], outcome: Worker | OSError) -> None:
    if future.done():  # Nobody waits any more.
        return
    if isinstance(outcome, OSError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class Scheduler:
    """Runs up to `running_jobs` workers. All that must survive it is in the database.

    A worker outlives a server that is killed. It holds its job's lock while it lives, so the next server
    finds it, and waits for it instead of starting another.
    """

    def __init__(
        self,
        settings: ServerSettings,
        jobs: JobStore,
        pool: EnginePool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is that of the workers; left out: the server's own, without its keys."""
        self._settings = settings
        self._jobs = jobs
        self._pool = pool
        self._workers = Workers(_without_keys(settings) if environment is None else environment)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, Worker] = {}
        self._engine_away_for: set[str] = set()
        """Jobs that the engine was put away for, until it is back."""
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with what earlier servers left, then go on with the queue."""
        self._loop = asyncio.get_running_loop()
        self._main = self._loop.create_task(self._run())

    def wake(self) -> None:
        """Look at the queue now; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def stop(self) -> None:
        """Ask the workers to make checkpoints and end; their jobs go back to the queue."""
        if self._main is not None:
            self._main.cancel()
        self._workers.close()
        for job in self._tasks:
            self._terminate(job)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_GRACE_SECONDS)
            for job in self._tasks:
                self._kill(job)

    def _terminate(self, job: str) -> None:
        """Ask a job's worker to end, whichever server started it; one of its processes tells the others."""
        process = self._processes.get(job)
        _send(signal.SIGTERM, self._folder(job).holders()[:1] if process is None else [process.pid])

    def _kill(self, job: str) -> None:
        """End all the processes of a job's worker, and what launched them."""
        process = self._processes.get(job)
        _send(signal.SIGKILL, [*([] if process is None else [process.pid]), *self._folder(job).holders()])

    def _folder(self, job: str) -> JobFolder:
        return JobFolder(self._settings.data_dir, job)

    async def _run(self) -> None:
        taken_up = False
        while True:
            self._woken.clear()
            try:
                if not taken_up:
                    await self._take_up_orphans()
                    taken_up = True
                await self._take_from_queue()
                await self._bring_engine_back()
            except Exception:  # noqa: BLE001  a full disk today must not end the queue for good
                _LOG.exception("the queue of jobs could not be looked at; it will be tried again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), 5 * _LOOK_SECONDS)

    async def _take_up_orphans(self) -> None:
        for job in await asyncio.to_thread(self._jobs.with_status, "running"):
            await self._make_room(job)
            self._add(job["id"], self._wait_for_orphan(job["id"]))

    async def _take_from_queue(self) -> None:
        for job in await asyncio.to_thread(self._jobs.with_status, "queued"):
            if len(self._tasks) >= self._settings.running_jobs:
                return
            if job["id"] in self._tasks or not await asyncio.to_thread(self._jobs.start, job["id"]):
                continue
            await self._make_room(job)
            self._add(job["id"], self._work(job["id"]))

    async def _make_room(self, job: Row) -> None:
        """Put the engine away for a job that needs the device."""
        if self._settings.stop_engine_for_jobs or job["metadata"].get(FREE_ENGINE) == "true":
            self._engine_away_for.add(job["id"])
            await self._pool.stop(JOBS)

    async def _bring_engine_back(self) -> None:
        """Once no job needs the device any more."""
        if self._engine_away_for and not self._engine_away_for & self._tasks.keys():
            await self._pool.start(JOBS)
            self._engine_away_for.clear()

    def _add(self, job: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[job] = task
        task.add_done_callback(lambda done: self._ended(job, done))

    def _ended(self, job: str, task: asyncio.Task[None]) -> None:
        del self._tasks[job]
        self._woken.set()
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("the scheduler failed at job %s", job, exc_info=task.exception())

    async def _work(self, job: str) -> None:
        folder = self._folder(job)
        begin = folder.log_size()
        worker = await self._workers.start(self._order(job))
        if worker is None:
            return
        self._processes[job] = worker
        try:
            code = await self._wait(job, worker)
        finally:
            self._processes.pop(job, None)
        await self._settle(job, folder.first_failure(begin) or exit_words(code))

    def _order(self, job: str) -> WorkerOrder:
        settings = self._settings
        return WorkerOrder(
            data_dir=settings.data_dir.absolute(),
            job=job,
            source=settings.model,
            name=settings.name,
            device=settings.device,
            dtype=settings.dtype,
            checkpoint_steps=settings.checkpoint_steps,
            processes=training_processes(settings),
            shards=settings.shard_training,
            algorithms=settings.algorithms,
            log_level=settings.log_level,
        )

    async def _wait(self, job: str, worker: Worker) -> int:
        """The worker's exit code. One that does not end after its job is cancelled is killed."""
        deadline: float | None = None
        while True:
            try:
                return await asyncio.wait_for(asyncio.shield(worker.code), _LOOK_SECONDS)
            except TimeoutError:
                deadline = await self._kill_overdue(job, deadline)

    async def _kill_overdue(self, job: str, deadline: float | None) -> float | None:
        """Kill the worker of a job that is over if it is still there after the deadline.

        Returns the deadline: None while the job runs, and some time from now when it is found to be over.
        """
        if (await asyncio.to_thread(self._jobs.get, job))["status"] == "running":
            return None
        if deadline is not None and time.monotonic() > deadline:
            self._kill(job)
        return deadline or time.monotonic() + _GRACE_SECONDS

    async def _wait_for_orphan(self, job: str) -> None:
        """A job that an earlier server started: its worker may still be at it."""
        deadline: float | None = None
        while await asyncio.to_thread(self._folder(job).holders):
            deadline = await self._kill_overdue(job, deadline)
            await asyncio.sleep(_LOOK_SECONDS)
        # It was not the job's fault: a machine that restarts often must not fail it.
        await self._settle(job, "the server was ended", counts=False)

    async def _settle(self, job: str, how: str, *, counts: bool = True) -> None:
        """After a worker's end: the job is over, or goes on later, or is given up."""
        row = await asyncio.to_thread(self._jobs.get, job)
        folder = self._folder(job)
        if row["status"] != "running":
            return
        if await asyncio.to_thread(folder.holders):
            await self._wait_for_orphan(job)
        elif counts and row["attempts"] >= _ATTEMPTS:
            reason = f"its worker ended {_ATTEMPTS} times without a checkpoint ({how}); {folder.last_lines()}"
            await asyncio.to_thread(self._jobs.fail, job, reason.rstrip("; "), "worker_crashed")
        else:
            step = folder.checkpoints.newest()
            start = f"from step {step}" if step else "from its start"
            event = f"The worker ended early ({how}); the job goes on {start}"
            attempts = row["attempts"] if counts else 0
            await asyncio.to_thread(self._jobs.requeue, job, event, attempts)


def _send(number: signal.Signals, processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            # The holder of a lock may not have written its number yet; 0 would be this process's group.
            if process:
                os.kill(process, number)


def _without_keys(settings: ServerSettings) -> dict[str, str]:
    """The environment without variables that hold the server's key."""
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    return {name: value for name, value in os.environ.items() if value != key}
