"""Teams: processes that train a job together, on this machine or on the nodes of a cluster.

Each is a program that a launcher starts. If the process that started them dies, they die with it, and the job
resumes from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

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
_LOCK_SECONDS = 60.0
"""Seconds for a process of an earlier team to end, after the process that started it was killed."""
_PAUSE_SECONDS = 0.2
_SHARED, _HEAD_LOCK = "shared", "head.lock"
"""The head's files in the job's folder. A node that finds other content, or no lock, has another folder."""

Places: TypeAlias = Callable[[int], AbstractAsyncContextManager[Sequence[Launcher]]]
"""Reserves places for some processes within a block, one launcher each. Raises EtudeError without room."""


@asynccontextmanager
async def local_places(count: int) -> AsyncIterator[Sequence[Launcher]]:
    """Yield launchers of processes on this machine."""
    yield [LocalLauncher()] * count


@dataclass(frozen=True, slots=True)
class MemberProgram(Program):
    """One process of a team. It calls a module's `main` with its `TeamMember` and the arguments."""

    module: str
    arguments: tuple[str, ...]
    folder: Path
    """The job's folder, on storage that all nodes share."""
    environment: Mapping[str, str] = field(default_factory=dict)
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
        member = [self.rank, host, str(self.folder), self.mark]
        arguments = json.dumps([member, self.module, self.arguments])
        variables = {name: str(value) for name, value in environment.items()} | dict(self.environment)
        return replace(python_command(__name__, arguments), environment=variables, address=address)


class TeamRun:
    """The processes of a team, from the wait for room to their end. All output goes to one log."""

    def __init__(self, places: Places, program: MemberProgram, size: int, log: Path) -> None:
        """Start as many processes as `size`."""
        self._program, self.size, self._log = program, size, log
        self.children: dict[int, Child] = {}
        """The started processes, by rank."""
        self.since = time.time()
        """When it began to wait for room, or all its processes had started, in Unix seconds."""
        self._running = asyncio.ensure_future(self._run(places))

    async def wait(self) -> str | None:
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
        with RunLock(self._program.folder / _HEAD_LOCK):
            write_atomically(self._program.folder / _SHARED, self._program.mark)
            async with places(self.size) as launchers:
                try:
                    await self._start(launchers)
                    return await self._watch()
                finally:
                    for child in self.children.values():
                        child.kill()
                        await child.wait()

    async def _start(self, launchers: Sequence[Launcher]) -> None:
        program = replace(self._program, size=self.size, is_apart=bool(launchers[0].address))

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
        waiting = {asyncio.ensure_future(child.wait()): rank for rank, child in self.children.items()}
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


class TeamMember:
    """This process as a member of its team."""

    def __init__(self, rank: int, node: str, folder: Path, mark: str) -> None:
        """`node` is the address of this machine. `folder` is the job's, and `mark` the head's file in it."""
        self.rank, self.node, self.folder = rank, node, folder
        self._mark = mark

    def require_shared(self) -> None:
        """Raise StoreError if this node has another job folder than the head, or one without locks."""
        try:
            same = (self.folder / _SHARED).read_text(encoding="utf-8") == self._mark
        except OSError:
            same = False
        if not same or not os.access(self.folder, os.W_OK) or lock_holder(self.folder / _HEAD_LOCK) is None:
            raise StoreError(
                f"{self.folder} on node {self.node} is another folder than the head's, or has no file locks; "
                "keep the run folder, or the server's --data-dir, on storage that all nodes mount at the "
                "same path, with file locks, as NFS 4 has them"
            )

    def lock(self, team: Team) -> RunLock:
        """Return this process's lock, held while it trains, so that only one of two teams writes.

        All processes of a team must call this together. Raises PeerLost if an earlier process does not end.
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
    (rank, node, folder, mark), module, arguments = json.loads(sys.stdin.readline())
    member = TeamMember(rank, node, Path(folder), mark)
    return int(importlib.import_module(module).main(member, *arguments))
