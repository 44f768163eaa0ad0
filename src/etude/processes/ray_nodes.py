"""Programs on the nodes of a Ray cluster: an actor starts each, sends its output, and reports its end.

If the actor dies, with its node or its driver, its program ends.
"""

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from etude.core.errors import EngineError, first_line
from etude.engines.programs import Child, Launcher, LocalLauncher, MaskedLines, NoRoom, ProcessEnd, Program
from etude.store.files import open_private, private_folder

_LOG_SECONDS = 0.5
"""Seconds between two reads of a program's output."""
_PIECE_BYTES = 64_000
"""The most bytes of output per read. Ray sends short answers directly, not through the object store."""
_LOST_SECONDS = 5.0
"""Seconds for Ray to report the end of a killed actor."""
_ANSWER_SECONDS = 30.0
"""Seconds for an actor to answer a short call."""
ROOM_SECONDS = 300.0
"""Seconds that programs wait for room on the cluster."""
_PAUSE_SECONDS = 1.0
"""Seconds before an actor that was lost at its start is placed again."""


class ProgramActor:
    """The actor, on its program's node."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="etude-"))

    async def start(self, program: Program) -> tuple[str, str, str, int]:
        """Start the program. Returns the node's address and id, the program's address and its pid.

        Raises EtudeError.
        """
        import ray

        node = str(ray.util.get_node_ip_address())
        log = self._folder / "log"
        self._child = await LocalLauncher(node).launch(program, log)
        self._output = log.open("rb")
        log.unlink()  # Without a name it disappears with this process, however that ends.
        self._folder.rmdir()
        return node, ray.get_runtime_context().get_node_id(), self._child.address, self._child.pid

    async def wait(self) -> ProcessEnd:
        """Wait for the program's end."""
        return await self._child.wait()

    async def output(self, start: int) -> bytes:
        """Return the next piece of its output, from byte `start` on; empty if there is none."""
        return os.pread(self._output.fileno(), _PIECE_BYTES, start)

    async def end(self, seconds: float) -> None:
        """End the program within `seconds`, and remove its files from the node."""
        await self._child.end(seconds)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def keep_folder(self, name: str, files: Mapping[str, bytes]) -> str:
        """Write files to the node's disk. Returns the path of their folder."""
        folder = private_folder(self._folder / name)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return str(folder)

    async def drop_folder(self, name: str) -> None:
        """Remove a folder that `keep_folder` wrote."""
        shutil.rmtree(self._folder / name, ignore_errors=True)


class RayChild(Child):
    """A program on some node."""

    def __init__(self, actor: Any, at: tuple[str, str, str, int], log: Path) -> None:
        """Follow a started program. `at` is the result of `ProgramActor.start`."""
        self._actor = actor
        self.node, self.node_id, self.address, self.pid = at
        self.log, self.begin = log, log.stat().st_size if log.exists() else 0
        self._lines, self._taken, self._turn = MaskedLines(), 0, asyncio.Lock()
        self._killed = asyncio.Event()
        self._end = asyncio.ensure_future(self._wait(asyncio.ensure_future(self._follow())))

    async def wait(self) -> ProcessEnd:
        """Wait until the program or its actor has ended."""
        return await asyncio.shield(self._end)

    async def _follow(self) -> ProcessEnd:
        """Write the program's output to the log while it runs. Returns how it ended."""
        ending: asyncio.Future[ProcessEnd] = asyncio.ensure_future(self._actor.wait.remote())
        try:
            while not ending.done():
                await self._fetch()
                await asyncio.wait({ending}, timeout=_LOG_SECONDS)
            end = ending.result()
        finally:
            ending.cancel()
        await self._try(self._fetch, _LOST_SECONDS)
        await self._try(lambda: self._actor.end.remote(0.0), _LOST_SECONDS)
        return end

    async def _wait(self, following: asyncio.Future[ProcessEnd]) -> ProcessEnd:
        import ray

        killed: asyncio.Future[Any] = asyncio.ensure_future(self._killed.wait())
        await asyncio.wait({following, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        # Ray may take a minute to notice a lost node, and waiting for it is useless.
        await asyncio.wait({following}, timeout=_LOST_SECONDS)
        self._write(self._lines.add(b""))
        if not following.done():
            following.cancel()
            return ProcessEnd("was lost with its node", is_lost=True)
        ray.kill(self._actor)
        try:
            return following.result()
        except ray.exceptions.RayError as error:
            return ProcessEnd(f"was lost with its actor or its node: {first_line(error)}", is_lost=True)

    async def _fetch(self) -> None:
        async with self._turn:
            while piece := await self._actor.output.remote(self._taken):
                self._taken += len(piece)
                self._write(self._lines.add(piece))

    def _write(self, text: bytes) -> None:
        # The journal reports a full disk.
        with contextlib.suppress(OSError), open_private(self.log, "ab") as file:
            file.write(text)

    def kill(self) -> None:
        """Kill the actor, which ends the program."""
        import ray

        if not self._end.done():
            ray.kill(self._actor)
            self._killed.set()

    async def end(self, seconds: float) -> None:
        if not self._end.done():
            await self._try(lambda: self._actor.end.remote(seconds), seconds + _ANSWER_SECONDS)
        self.kill()
        await self.wait()

    async def catch_up(self) -> None:
        await self._try(self._fetch, _ANSWER_SECONDS)

    async def send_folder(self, folder: Path) -> str:
        """Send a folder's files to the program's node. Returns their path there."""
        import ray

        files = await asyncio.to_thread(
            lambda: {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        )
        try:
            return str(await self._actor.keep_folder.remote(folder.name, files))
        except ray.exceptions.RayError as error:
            raise EngineError(f"{folder.name} cannot be sent to {self.node}: {first_line(error)}") from error

    async def drop_folder(self, name: str) -> None:
        await self._try(lambda: self._actor.drop_folder.remote(name), _ANSWER_SECONDS)

    async def _try(self, work: Callable[[], Awaitable[Any]], seconds: float) -> None:
        """Do work that needs the actor for at most these `seconds`, and ignore its loss."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(seconds):
                await work()


class RayLauncher(Launcher):
    """Places programs on the nodes of the cluster that this process is connected with."""

    def __init__(
        self, cpus: float, gpus: float, *, seconds: float = ROOM_SECONDS, strategy: object = "SPREAD"
    ) -> None:
        """Set what Ray reserves for a program, the `seconds` it may wait for room, and Ray's strategy."""
        import ray

        self.address = str(ray.util.get_node_ip_address())
        self._seconds = seconds
        room = {"num_cpus": cpus, "num_gpus": gpus}
        self._options = {**room, "scheduling_strategy": strategy, "max_restarts": 0}
        self._room = f"{cpus:g} CPUs and {gpus:g} GPUs"

    async def launch(self, program: Program, log: Path) -> RayChild:
        """Start a program on a node, once there is room. Raises NoRoom, EngineError."""
        import ray

        private_folder(log.parent)
        lost = ""
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    try:
                        return await self._start(program, log)
                    except ray.exceptions.RayError as error:
                        # Ray may place actors on a lost node until it notices the loss.
                        lost = f" (the last attempt: {first_line(error)})"
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError as error:
            raise NoRoom(
                f"Ray had no room for a process of {self._room} within {self._seconds:g} s{lost}; ask "
                "for fewer, or add nodes: ray start --address=…"
            ) from error

    async def _start(self, program: Program, log: Path) -> RayChild:
        """Start a program. Raises EngineError, or RayError if another attempt may succeed."""
        import ray

        try:
            actor: Any = ray.remote(ProgramActor).options(**self._options).remote()
            try:
                # Ray sends a short argument directly, not through the object store.
                return RayChild(actor, await actor.start.remote(program), log)
            except BaseException:
                ray.kill(actor)
                raise
        except ray.exceptions.RayTaskError as error:
            raise EngineError(str(error.cause)) from error
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                raise EngineError(f"Ray cannot start a program: {first_line(error)}") from error
            raise
        except (ValueError, TypeError) as error:
            raise EngineError(f"Ray cannot start a program: {error}; see `cluster`") from error
