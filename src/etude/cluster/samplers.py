"""vLLM processes on the nodes of a Ray cluster: an actor starts each, and says how it ends.

The process that started them all asks them over the network, and watches them. An actor's death, with its
node's or with its driver's, ends its vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from etude.core.errors import EngineError, first_line
from etude.core.secrets import masked
from etude.inference.child_process import end_of, last_lines
from etude.inference.vllm_child import LocalLauncher, LocalVllm, VllmOptions, log_of
from etude.store.files import open_private, private_folder

_LOG_CHARACTERS = 200_000
_LOOK_SECONDS = 3600.0
_PAUSE_SECONDS = 1.0
"""Before an actor that was lost at its start is placed again."""
_ANSWER_SECONDS = 30.0
"""For an actor to do what takes a moment."""


@dataclass(frozen=True, slots=True)
class SamplerRoom:
    """The resources that Ray sets aside for each vLLM."""

    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def words(self) -> str:
        """The resources by Ray's names."""
        return f"{{CPU: {self.cpus:g}" + (f", GPU: {self.gpus:g}}}" if self.gpus else "}")


def sampler_room(cpus: float, gpus: float | None, *, on_gpus: bool) -> SamplerRoom:
    """The room for each, of the cluster that this process is connected with.

    With `gpus` None it is one where the cluster has any, and they are to be used.
    """
    import ray

    there = 1.0 if on_gpus and ray.cluster_resources().get("GPU") else 0.0
    return SamplerRoom(cpus, there if gpus is None else gpus)


class Sampler:
    """An actor: runs a vLLM on its node, in a folder of its own."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="etude-vllm-"))
        self._child: LocalVllm | None = None

    async def start(self, options: VllmOptions, source: str, key: str) -> tuple[str, str, str, int]:
        """Start it at the node's address. Gives that, the node's id, the base URL and the process's number.

        Raises EngineError.
        """
        import ray

        node = str(ray.util.get_node_ip_address())
        if _is_missing(source):
            raise EngineError(
                f"the node {node} has no folder {source}: put models, and the server's --data-dir, on "
                "storage that all nodes share, or serve a name on the Hugging Face hub"
            )
        here = replace(options, folder=self._folder, host=node)
        self._child = await LocalLauncher().launch(here, source, SecretStr(key))
        return node, ray.get_runtime_context().get_node_id(), self._child.base_url, self._child.pid

    async def ended(self) -> str:
        """Wait for its end, and say how it ended."""
        assert self._child is not None
        while (how := await self._child.ended(_LOOK_SECONDS)) is None:
            continue
        return how

    async def end(self, *, politely: bool) -> None:
        """End it, and leave nothing of it on the node."""
        if self._child is not None:
            await self._child.end(politely=politely)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def keep_lora(self, name: str, files: Mapping[str, bytes]) -> str:
        """Write LoRA weights to the node's disk; the path of their folder."""
        folder = self._folder / name
        private_folder(folder)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return str(folder)

    async def drop_lora(self, name: str) -> None:
        """Remove LoRA weights from the node's disk."""
        shutil.rmtree(self._folder / name, ignore_errors=True)

    async def log(self) -> str:
        """The end of what it printed."""
        with contextlib.suppress(OSError):
            text = (self._folder / "vllm.log").read_text(encoding="utf-8", errors="replace")
            return text[-_LOG_CHARACTERS:]
        return ""


class RayVllm:
    """A vLLM on some node."""

    def __init__(self, actor: Any, options: VllmOptions, started: tuple[str, str, str, int]) -> None:
        self.where, self.node_id, self.base_url, self.pid = started
        self._actor = actor
        self._options = options
        self._is_lost = False
        self._end = asyncio.ensure_future(self._wait())

    async def ended(self, seconds: float) -> str | None:
        """How it ended, or that its node or its actor did."""
        await asyncio.wait({self._end}, timeout=seconds)
        return self._end.result() if self._end.done() else None

    async def end(self, *, politely: bool) -> None:
        """End it and its actor; its log comes to the folder here."""
        import ray

        await self._fetch_log()
        if not self._is_lost:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._actor.end.remote(politely=politely)
        ray.kill(self._actor)
        self._end.cancel()
        await asyncio.wait({self._end})

    async def lora_path(self, name: str, folder: Path) -> str:
        """The path at its node, to which the files of the folder are sent."""
        import ray

        files = await asyncio.to_thread(
            lambda: {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        )
        try:
            return str(await self._actor.keep_lora.remote(name, files))
        except ray.exceptions.RayError as error:
            raise EngineError(f"{name} cannot be sent to {self.where}: {first_line(error)}") from error

    async def drop_lora(self, name: str) -> None:
        """Remove LoRA weights from its node."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            await self._actor.drop_lora.remote(name)

    async def printed(self) -> str:
        """The end of its log."""
        return end_of(await self._fetch_log(), _LOG_CHARACTERS)

    async def log_end(self) -> str:
        """The last lines of its log, as far as that came here."""
        log = await self._fetch_log()
        lines = last_lines(log)
        return f"The last lines of {log}, from {self.where}:\n{lines}" if lines else f"{log} is empty"

    async def _fetch_log(self) -> Path:
        import ray

        log = log_of(self._options)
        if self._is_lost:
            return log
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                text = await self._actor.log.remote()
            private_folder(log.parent)
            with open_private(log, "w") as file:
                file.write(masked(text))
        return log

    async def _wait(self) -> str:
        import ray

        try:
            return str(await self._actor.ended.remote())
        except ray.exceptions.RayError as error:
            self._is_lost = True
            return f"was lost with its actor or its node, {self.where} ({first_line(error)})"


class SamplerLauncher:
    """Places vLLM processes on the nodes of the cluster that this process is connected with."""

    def __init__(self, room: SamplerRoom) -> None:
        self._room = room

    async def launch(self, options: VllmOptions, source: str, key: SecretStr) -> RayVllm:
        """Start one on a node that has room, and wait for that if need be. Raises EngineError."""
        seconds, lost = options.start_seconds, ""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return await self._placed(options, source, key)
                    except _Lost as error:
                        # Ray may place actors on a node that is gone for as long as it has not seen that.
                        lost = f" (the last attempt: {error})"
                        await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError as error:
            raise EngineError(
                f"Ray had no room for a vLLM of {self._room.words} within {seconds:g} s{lost}; ask for fewer "
                "--samplers, or add nodes: ray start --address=…"
            ) from error

    async def _placed(self, options: VllmOptions, source: str, key: SecretStr) -> RayVllm:
        """Raises _Lost where the actor is lost before it has started one, EngineError."""
        import ray

        room = {"num_cpus": self._room.cpus, "num_gpus": self._room.gpus}
        kind = ray.remote(Sampler).options(**room, scheduling_strategy="SPREAD", max_restarts=0)
        actor: Any = kind.remote()
        try:
            # A short argument goes from process to process, and not into the object store.
            started = await actor.start.remote(options, source, key.get_secret_value())
        except ray.exceptions.RayTaskError as error:
            ray.kill(actor)
            raise EngineError(str(error.cause)) from error
        except ray.exceptions.RayError as error:
            ray.kill(actor)
            raise _Lost(first_line(error)) from error
        except asyncio.CancelledError:
            ray.kill(actor)
            raise
        return RayVllm(actor, options, started)


class _Lost(Exception):
    """An actor that Ray has lost."""


def _is_missing(source: str) -> bool:
    return Path(source).is_absolute() and not Path(source).exists()
