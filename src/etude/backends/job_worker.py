"""Jobs that other processes train: their orders, their work, and their reports.

A job's folder is all that they share with the process that started them.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from threading import Event

from pydantic import BaseModel

from etude.backends.job_training import Interrupted, News, TooLittleMemory, training_error
from etude.backends.state_folders import StateFolders
from etude.config.import_path import class_path
from etude.core.errors import EtudeError, TrainingError
from etude.core.process import set_up_process
from etude.engines.programs import last_lines
from etude.learner.learner import TrainingCanceled
from etude.learner.team import PeerLost, Team, join_team
from etude.models.device import choose_device, choose_dtype, dtype_name
from etude.processes.team import MemberProgram, TeamMember, TeamRun
from etude.store.files import append_json_line, open_private, private_folder, write_atomically
from etude.store.run_folder import RunLock, lock_holder

_LOG = logging.getLogger("etude.jobs")
_PEER_SECONDS = 600.0
"""Seconds that a process waits for another one: longer than any checkpoint takes to write."""
_ALONE_SECONDS = 60.0
"""Seconds for a forked process to end with a checkpoint after its parent has ended."""
_ATTEMPTS = 3
"""The number of teams that may end without a checkpoint before their job fails."""
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 20.0
"""Seconds for processes to write a checkpoint and end once their job is not wanted any more."""
_FORK_SERVER_LOST = 255
"""The exit code that multiprocessing shows for a process whose fork server has ended."""
_SLOW_IMPORTS = (
    "peft",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


class JobFolder:
    """A job's folder: its order, the news of its processes, their locks and log, and checkpoints."""

    def __init__(self, path: Path, log: Path | None = None) -> None:
        """`log` gets the standard output and error of the processes. Default: `worker.log` in the folder."""
        self.path = path
        self.log = log or path / "worker.log"
        self.order = path / "order.json"
        self.news = path / "news.jsonl"
        self.checkpoints = StateFolders(path, "step-", "checkpoint")

    def holders(self) -> list[int]:
        """Return the pids of the processes that train the job."""
        return [pid for path in sorted(self.path.glob("lock*")) if (pid := lock_holder(path)) is not None]

    def write_order(self, order: JobOrder) -> None:
        """Store the order for the processes. Raises StoreError."""
        private_folder(self.path)
        write_atomically(self.order, order.model_dump_json(), exact=True)

    def add_news(self, news: News) -> None:
        """Add a report. Raises StoreError."""
        if news.kind == "started":
            _LOG.info("begins after %d steps", news.step)
        append_json_line(self.news, news.model_dump(exclude_defaults=True))

    def read_news(self, position: int) -> Iterator[tuple[News, int]]:
        """Yield the reports after a position in bytes, each with the position after it."""
        with suppress(FileNotFoundError), self.news.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # It is being written, or its process was killed.
                position += len(line)
                with suppress(ValueError):
                    yield News.model_validate_json(line), position


class JobOrder(BaseModel, ABC, frozen=True, ser_json_inf_nan="constants"):
    """All that processes need to train a job, without secrets."""

    job: str
    device: str
    dtype: str
    shards: bool
    """Whether each process holds only a part of the weights and of the optimiser state."""

    @abstractmethod
    def train(self, folder: JobFolder, team: Team, stopping: Event) -> None:
        """Train from the newest checkpoint, store the weights, and tell that the job is done.

        All processes of the team call this. Raises Interrupted, after a checkpoint, when `stopping` is set.
        """

    def show_logs(self) -> None:
        """Make this process write log lines."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def loading(self, team: Team) -> dict[str, str]:
        """Return the `device` and `dtype` with which this process loads the policy."""
        device = self.device if team.device is None else str(team.device)
        chosen = choose_device(device)
        if not team.shards or chosen.type == "cpu":
            return {"device": device, "dtype": self.dtype}
        # The whole model need not fit on a device that will hold only a part of it.
        return {"device": "cpu", "dtype": dtype_name(choose_dtype(self.dtype, chosen, 0))}


def program(order: type[JobOrder], folder: JobFolder, shared: Path) -> MemberProgram:
    """Return the program of a team's processes, which lock the folder `shared`."""
    return MemberProgram(__name__, (class_path(order), str(folder.path)), shared)


def main(member: TeamMember, order: str, path: str) -> int:
    """Do this process's part of a job, as a member of its team. Return the exit code."""
    return _work(order, JobFolder(Path(path)), member)


class ForkedProcess:
    """One process that trains a job, forked from one that has done the slow imports.

    It has its own session, so that Ctrl-C reaches only its parent, and ends with its parent.
    """

    def __init__(self, process: ForkServerProcess | SpawnProcess) -> None:
        """`process` was started."""
        self._process = process
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str | None] = loop.create_future()

        def note_end() -> None:
            loop.remove_reader(process.sentinel)
            code = process.exitcode or 0
            if code == _FORK_SERVER_LOST:
                self._send(signal.SIGKILL)  # It still runs, but nobody would learn how it ends.
            self._end.set_result(f"exit code {code}" if code > 0 else f"signal {-code}" if code else None)

        loop.add_reader(process.sentinel, note_end)

    @classmethod
    async def start(cls, order: type[JobOrder], folder: JobFolder) -> ForkedProcess:
        """Start the process. Raises OSError if it cannot start."""
        # On other systems, libraries may break in a fork.
        forks, spawns = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        forks.set_forkserver_preload([order.__module__, *_SLOW_IMPORTS])
        kind = forks.Process if sys.platform == "linux" else spawns.Process
        process = kind(target=_work_forked, args=[class_path(order), str(folder.path)])
        await asyncio.to_thread(process.start)
        return cls(process)

    async def wait(self) -> str | None:
        """Wait until the process has ended. Return why it ended early, or None if it did its part."""
        return await asyncio.shield(self._end)

    async def end(self, seconds: float) -> None:
        """Ask the process to end, kill it after this many `seconds`, and return once it has ended."""
        if seconds:
            self._send(signal.SIGTERM)
            await asyncio.wait({self._end}, timeout=seconds)
        self._send(signal.SIGKILL)
        await self.wait()

    def _send(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        assert self._process.pid
        if not self._end.done():
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def _work_forked(order: str, path: str) -> None:
    os.setsid()
    parent, folder = multiprocessing.parent_process(), JobFolder(Path(path))
    assert parent is not None

    def watch() -> None:
        """End with a checkpoint when the parent has ended, or at once if that takes too long."""
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ALONE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="etude-parent-watch", daemon=True).start()
    with open_private(folder.log, "ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    sys.exit(_work(order, folder, None))


def _work(path: str, folder: JobFolder, member: TeamMember | None) -> int:
    """Do this process's part of a job, or stop if asked. Return the exit code.

    An error that another attempt would repeat is reported. After the loss of a peer, new processes resume
    the job from its last checkpoint.
    """
    set_up_process()
    order: JobOrder = pkgutil.resolve_name(path).model_validate_json(folder.order.read_text("utf-8"))
    order.show_logs()
    stopping = Event()  # Set by SIGTERM: this process must stop for now.
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    try:
        _train(order, folder, member, stopping)
    except PeerLost as error:
        _LOG.error("job %s: %s", order.job, error)
        return 1
    except (Interrupted, TrainingCanceled) as reason:
        _LOG.warning("job %s: %s", order.job, type(reason).__name__)
    except Exception as error:  # noqa: BLE001  trying again would end the same way, whatever it was
        if not isinstance(error, EtudeError):
            _LOG.exception("job %s", order.job)
        known = training_error(error)
        code = "insufficient_memory" if isinstance(known, TooLittleMemory) else "training_failed"
        folder.add_news(News(kind="failed", message=str(known), code=code))
        return 1
    return 0


def _train(order: JobOrder, folder: JobFolder, member: TeamMember | None, stopping: Event) -> None:
    """Train, alone or in a team, while this process holds its lock, so that only one of two teams writes."""
    if member is None:
        with RunLock(folder.path / "lock"):
            order.train(folder, Team(), stopping)
        return
    member.require_shared()
    with join_team(order.device, _PEER_SECONDS, shards=order.shards) as team, member.lock(team):
        order.train(folder, team, stopping)


class ProcessJob(ABC):
    """A job that other processes train. If they end early, the next ones resume from its last checkpoint."""

    def __init__(self, folder: JobFolder, position: int = 0) -> None:
        """`position` is where the news begin that were not heard yet."""
        self.folder = folder
        self.position = position

    @abstractmethod
    async def start(self) -> TeamRun | ForkedProcess:
        """Start processes that train the job in `folder`."""

    @abstractmethod
    async def take_news(self, news: Sequence[News]) -> None:
        """Take news of the job, which end at `position`."""

    @abstractmethod
    async def is_wanted(self) -> bool:
        """Return whether to go on with the job."""

    async def run(self, cause: str = "") -> News | None:
        """Return the news of the job's end, or None if it is not wanted any more.

        `cause` is why processes have ended that were started elsewhere, which do not count. Raises
        TrainingError if several teams ended without progress.
        """
        attempts, newest = 0, -1 if cause else self.folder.checkpoints.newest()
        while (end := await self._listen()) is None and await self.is_wanted():
            if cause:
                step = self.folder.checkpoints.newest()
                attempts, newest = 0 if step > newest else attempts + 1, step
                if attempts == _ATTEMPTS:
                    lines = last_lines(self.folder.log, 5).replace("\n", " | ")
                    raise TrainingError(
                        f"its processes ended {attempts} times without a checkpoint ({cause}); see "
                        f"{self.folder.log}: {lines}"
                    )
                await self.take_news([News(kind="ended", message=cause, step=step)])
            cause = await self._work()
        return end

    async def _listen(self) -> News | None:
        """Hear what is new. Return the news of the job's end, which stay at `position`."""
        unread = await asyncio.to_thread(lambda: [*self.folder.read_news(self.position)])
        heard = [*takewhile(lambda each: not each[0].is_end, unread)]
        if heard:
            self.position = heard[-1][1]
            await self.take_news([news for news, _ in heard])
        return unread[len(heard)][0] if len(unread) > len(heard) else None

    async def _work(self) -> str:
        """Start processes and wait for their end. Return why they ended."""
        processes = await self.start()
        ending = asyncio.ensure_future(processes.wait())
        asked: asyncio.Future[None] | None = None
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=_LOOK_SECONDS)
                await self._listen()
                if asked is None and not await self.is_wanted():
                    asked = asyncio.ensure_future(processes.end(_GRACE_SECONDS))
        finally:
            await processes.end(0.0)
        return ending.result() or "all of them are done"
