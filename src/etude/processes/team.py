"""Teams: processes that train a job together, on this machine or on the nodes of a cluster.

Each is a program that a launcher starts. If the process that started them dies, they die with it, and the job
resumes from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from etude.core.errors import EtudeError, StoreError, first_line
from etude.engines.programs import (
    Child,
    Command,
    Launcher,
    LocalLauncher,
    ProcessEnd,
    Program,
    python_command,
)
from etude.store.files import write_atomically
from etude.store.run_folder import RunLock, lock_holder

if TYPE_CHECKING:
    from etude.learner.team import Team

_LAST_WORDS_SECONDS = 3.0
"""Seconds to hear from processes that end after the first, which may only have lost its peer."""
_CALL_SECONDS = 120.0
"""Seconds for the head to answer a call."""
_LOCK_SECONDS = 60.0
"""Seconds for a process of an earlier team to end, after the process that started it was killed."""
_PAUSE_SECONDS = 0.2
_SHARED, _HEAD_LOCK = "shared", "head.lock"
"""The head's files in the job's folder. A node that finds other content, or no lock, has another folder."""

Places: TypeAlias = Callable[[int], AbstractAsyncContextManager[Sequence[Launcher]]]
"""Reserves places for so many processes within a block, one launcher each. Raises EtudeError without room."""


@asynccontextmanager
async def local_places(count: int) -> AsyncIterator[Sequence[Launcher]]:
    """Yield launchers of processes on this machine."""
    yield [LocalLauncher()] * count


class HeadLost(EtudeError):
    """The process on the head that started this one has ended, so nobody receives its results."""


@dataclass(frozen=True, slots=True)
class MemberProgram(Program):
    """One process of a team. It calls a module's `main` with its `TeamMember` and the arguments."""

    module: str
    arguments: tuple[str, ...]
    folder: Path
    """The job's folder, on storage that all nodes share."""
    environment: Mapping[str, str] = field(default_factory=dict)
    desk: Desk | None = None
    """The object at the head that members call, if there is one."""
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    rank: int = 0
    size: int = 1
    first: str = ""
    """The address at which the first process meets the others; empty for the first process itself."""
    is_apart: bool = False
    """Whether the process has its own devices, as on a cluster, where Ray shows it no others."""

    def command(self, host: str) -> Command:
        """Return the command, with the environment that torch's launcher would set."""
        address = self.first
        if not address:
            with socket.socket() as listening:
                listening.bind(("", 0))
                address = f"{host}:{listening.getsockname()[1]}"
        name, _, port = address.rpartition(":")
        rank, size = (0, 1) if self.is_apart else (self.rank, self.size)
        threads = os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // size)
        environment = {
            **{"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size},
            **{"MASTER_ADDR": name, "MASTER_PORT": port, "OMP_NUM_THREADS": threads},
        }
        desk = None if self.desk is None else (self.desk.host, self.desk.port, self.desk.key.hex())
        member = [self.rank, host, str(self.folder), self.mark, desk]
        said = json.dumps([member, self.module, self.arguments])
        variables = {name: str(value) for name, value in environment.items()} | dict(self.environment)
        return replace(python_command(__name__, said), environment=variables, address=address)


class TeamRun:
    """The processes of a team, from the wait for room to their end. All output goes to one log."""

    def __init__(
        self, places: Places, program: MemberProgram, size: int, log: Path, desk: object = None
    ) -> None:
        """Start as many processes as `size`. They may call the methods of `desk`."""
        self._program, self.size, self._log, self._desk = program, size, log, desk
        self.children: dict[int, Child] = {}
        """The started processes, by rank."""
        self.since = time.time()
        """When it began to wait for room, or all its processes had started, in Unix seconds."""
        self._running = asyncio.ensure_future(self._run(places))

    async def ended(self) -> str | None:
        """Wait until no process is left. Return why the team ended early, or None if all did their part."""
        await asyncio.wait({self._running})
        if self._running.cancelled():
            return "it was stopped before all its processes had started"
        error = self._running.exception()
        if error is not None and not isinstance(error, EtudeError):
            raise error
        return self._running.result() if error is None else first_line(error)

    async def end(self, seconds: float) -> None:
        """Ask the processes to end, kill them after this many `seconds`, and return once they have ended."""
        if len(self.children) < self.size or not seconds:
            self._running.cancel()
        else:
            await asyncio.gather(*(child.end(seconds) for child in self.children.values()))
        await asyncio.wait({self._running})

    async def _run(self, places: Places) -> str | None:
        lock = RunLock(self._program.folder / _HEAD_LOCK)
        try:
            write_atomically(self._program.folder / _SHARED, self._program.mark)
            async with places(self.size) as launchers:
                try:
                    with open_desk(self._desk, launchers[0].address) as desk:
                        await self._start(launchers, desk)
                        return await self._watch()
                finally:
                    for child in self.children.values():
                        child.kill()
                        await child.ended()
        finally:
            lock.release()

    async def _start(self, launchers: Sequence[Launcher], desk: Desk | None) -> None:
        program = replace(self._program, desk=desk, size=self.size, is_apart=bool(launchers[0].address))

        async def start(rank: int, first: str = "") -> None:
            own = replace(program, rank=rank, first=first)
            self.children[rank] = await launchers[rank].launch(own, self._log)

        await start(0)
        others = (start(rank, self.children[0].address) for rank in range(1, self.size))
        for error in await asyncio.gather(*others, return_exceptions=True):
            if error is not None:
                raise error
        self.since = time.time()

    async def _watch(self) -> str | None:
        """Wait for the processes. Return the cause of the first failure, or None."""
        waiting = {asyncio.ensure_future(child.ended()): rank for rank, child in self.children.items()}
        failures: dict[int, ProcessEnd] = {}
        try:
            while left := [each for each in waiting if not each.done()]:
                seconds = _LAST_WORDS_SECONDS if failures else None
                done, _ = await asyncio.wait(left, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                failures |= {waiting[each]: each.result() for each in done if each.result().code != 0}
        finally:
            for each in waiting:
                each.cancel()
        # A process that was not killed has usually lost one that was.
        killed = {rank: end for rank, end in failures.items() if (end.code or -1) < 0}
        for rank, end in sorted((killed or failures).items()):
            return f"process {rank} {end.how}"
        return None


@dataclass(frozen=True, slots=True)
class Desk:
    """Where the members of a team call an object at the head, such as its database."""

    host: str
    port: int
    key: bytes = field(repr=False)


@contextmanager
def open_desk(thing: object, host: str) -> Iterator[Desk | None]:
    """Answer calls of the object's methods, in threads, at the address `host`; none for None."""
    if thing is None:
        yield None
        return
    key, over = secrets.token_bytes(32), threading.Event()
    with Listener((host, 0), backlog=64) as listener:

        def accept() -> None:
            while not over.is_set():
                arguments = listener.accept(), key, thing
                threading.Thread(target=_answer, args=arguments, daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield Desk(host, listener.address[1], key)
        finally:
            over.set()
            Client(listener.address).close()  # Wakes the thread.
            accepting.join()


def _answer(connection: Connection, key: bytes, thing: object) -> None:
    """Answer the calls of one member, once each end has proved that it knows the key."""
    with contextlib.suppress(OSError, EOFError, AuthenticationError), connection:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        while True:
            name, arguments, options = connection.recv()
            result, failure = None, None
            try:
                result = attrgetter(name)(thing)(*arguments, **options)
            except Exception as error:  # noqa: BLE001  the caller raises it
                failure = error
            connection.send((result, failure))


class TeamMember:
    """This process as a member of its team."""

    def __init__(self, rank: int, node: str, folder: Path, mark: str, desk: Desk | None = None) -> None:
        """`node` is the address of this machine. `folder` is the job's, and `mark` the head's file in it."""
        self.rank, self.node, self.folder = rank, node, folder
        self._mark = mark
        self._turn = threading.Lock()
        self._head: Connection | None = None
        if desk is not None:
            try:
                self._head = Client((desk.host, desk.port))
                answer_challenge(self._head, desk.key)
                deliver_challenge(self._head, desk.key)
            except (OSError, EOFError, AuthenticationError) as error:
                raise HeadLost(f"{node} cannot reach the head at {desk.host}:{desk.port}: {error}") from error

    @property
    def has_desk(self) -> bool:
        """Whether there is an object at the head to call."""
        return self._head is not None

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the desk's object or of one of its attributes, such as `jobs.get`.

        Raises the method's errors, and HeadLost.
        """
        assert self._head is not None
        try:
            with self._turn:
                self._head.send((name, args, options))
                if not self._head.poll(_CALL_SECONDS):
                    raise HeadLost("the process on the head that started this one does not answer")
                result, error = self._head.recv()
        except (OSError, EOFError) as lost:
            raise HeadLost("the process on the head that started this one has ended") from lost
        if error is not None:
            raise error
        return result

    def require_shared(self) -> None:
        """Raise StoreError if this node has another job folder than the head, or one without locks."""
        try:
            same = (self.folder / _SHARED).read_text(encoding="utf-8") == self._mark
        except OSError:
            same = False
        problem = None
        if not same:
            problem = "is not the folder that the head has there"
        elif not os.access(self.folder, os.W_OK):
            problem = "is there, but cannot be written to"
        elif lock_holder(self.folder / _HEAD_LOCK) is None:
            problem = "is shared without file locks, so that two teams could write at once"
        if problem is not None:
            raise StoreError(
                f"{self.folder} on node {self.node} {problem}; keep the run folder, or the server's "
                "--data-dir, on storage that all nodes mount at the same path, with file locks, as NFS 4 has "
                "them"
            )

    def lock(self, team: Team) -> RunLock:
        """Return this process's lock, held while it trains, so that only one of two teams writes.

        All processes of a team must call this together. Raises PeerLost if a process of an earlier team does
        not end.
        """
        from etude.learner.team import PeerLost

        end, lock = time.monotonic() + _LOCK_SECONDS, None
        while lock is None and time.monotonic() < end:
            try:
                lock = RunLock(self.folder / (f"lock-{team.rank}" if team.rank else "lock"))
            except StoreError:
                time.sleep(_PAUSE_SECONDS)
        if team.any(lock is None) or lock is None:
            raise PeerLost("a process of an earlier team still trains the job")
        return lock


def main() -> int:
    """Read the order, and do this process's part. Return the exit code."""
    (rank, node, folder, mark, desk), module, arguments = json.loads(sys.stdin.readline())
    at = None if desk is None else Desk(desk[0], desk[1], bytes.fromhex(desk[2]))
    try:
        member = TeamMember(rank, node, Path(folder), mark, at)
    except HeadLost as error:
        sys.exit(str(error))
    return int(importlib.import_module(module).main(member, *arguments))
