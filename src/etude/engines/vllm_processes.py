"""Several vLLM processes of one model, one per device, used as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from etude.core.errors import EngineAway, EngineError
from etude.engines.vllm_process import VllmProcess

_LOG = logging.getLogger("etude.vllm")
_MOST_CONVERSATIONS = 2**17
"""Conversations to remember; the least recently used ones may move to another process."""


class VllmProcesses:
    """Processes with the same model and LoRA weights; a conversation stays at one while that one runs.

    Each process is watched and restarted separately. It gets no calls during a restart.
    """

    def __init__(self, processes: Sequence[VllmProcess]) -> None:
        """If there are several processes, none may have been started: they will share a key."""
        self.processes = tuple(processes)
        for process in self.processes[1:]:
            process.key, process.changed = self.processes[0].key, self.processes[0].changed
        self._homes: dict[str, VllmProcess] = {}
        """The process of each conversation, least recently used first."""
        self._turn = 0
        self._changed = self.processes[0].changed
        self._source = ""
        self._loras: dict[str, Path] = {}
        self._starting: dict[VllmProcess, asyncio.Task[None]] = {}

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that requests to any process need."""
        return self.processes[0].headers

    async def start(self, source: str, *, every: bool = False, in_place: bool = False) -> None:
        """Serve `source`; return once requests are answered.

        With `in_place`, running processes load the weights without a restart, if they can. The weights must
        have the same shapes, and no request may be running.

        Processes that fail to start while others succeed are logged, and the next `start` tries them again.
        Raises EngineError if none starts. With `every`, raises it if any fails, and stops the others.
        """
        if source != self._source:
            await self._drop_starts()
            self._loras.clear()
            self._source = source
            if in_place:
                await asyncio.gather(*(process.load_in_place(source) for process in self.processes))
        idle = [each for each in self.processes if not each.serves(source) and each not in self._starting]
        if len(idle) < len(self.processes):
            for process in idle:
                self._starting[process] = asyncio.create_task(self._start_behind(process))
            await self._wait_for_ready(self.processes[0].options.start_seconds)
            return
        starts = (each.start(source, self._loras) for each in idle)
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures and (every or len(failures) == len(outcomes)):
            if every:
                await self.stop()
            raise failures[0]
        for failure in failures:
            _LOG.error("%s; the other processes continue without it", failure)

    async def stop(self) -> None:
        """End all processes and forget their LoRA weights."""
        await self._drop_starts()
        self._loras.clear()
        self._source = ""
        await asyncio.gather(*(process.stop() for process in self.processes))

    async def add_lora(self, name: str, folder: Path) -> None:
        """Load LoRA weights in every process, under a name never used before.

        If some processes refuse them and others do not, those are restarted with them. Raises EngineError if
        no process loads them.
        """
        self._loras[name] = folder  # Also for processes that are about to start.
        outcomes = await asyncio.gather(
            *(process.add_lora(name, folder) for process in self.processes), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        other = next((error for error in failures if not isinstance(error, EngineError)), None)
        if other is not None or True not in outcomes:
            await self.remove_lora(name)
            raise other or next(iter(failures), EngineError("vLLM does not run"))
        for process, outcome in zip(self.processes, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                await process.request_restart(f"vLLM did not take {name}: {outcome}")

    async def remove_lora(self, name: str) -> None:
        """Unload LoRA weights everywhere; ignore those that are not loaded."""
        self._loras.pop(name, None)
        await asyncio.gather(*(process.remove_lora(name) for process in self.processes))

    async def choose(
        self, conversation: str, seconds: float, avoid: Collection[VllmProcess] = ()
    ) -> VllmProcess:
        """Return the process for a call of a conversation: its own if that is ready, else the next in turn.

        Processes in `avoid`, where the same call has failed, are used last. Waits until one is ready. Raises
        EngineAway if none is ready in time, or none is starting.
        """
        ready = await self._wait_for_ready(seconds)
        usable = [process for process in ready if process not in avoid] or ready
        process = self._homes.pop(conversation, None)
        if process not in usable:
            process = usable[self._turn % len(usable)]
            self._turn += 1
        self._homes[conversation] = process
        if len(self._homes) > _MOST_CONVERSATIONS:
            del self._homes[next(iter(self._homes))]
        return process

    def has_other(self, avoid: Collection[VllmProcess]) -> bool:
        """Return whether a process outside `avoid` is ready now."""
        return any(process not in avoid for process in self._ready())

    def status(self) -> dict[str, Any]:
        """Return the state of the processes, as fields of `GET /engine/status`."""
        states = [process.state for process in self.processes]
        together: dict[str, Any] = {
            "process": "running" if "running" in states else states[0],
            "restarts": sum(process.restarts for process in self.processes),
            "reason": next((process.reason for process in self.processes if process.reason), None),
        }
        if len(self.processes) > 1:
            together["processes"] = [
                {
                    "device": process.options.device,
                    "node": process.where,
                    "process": process.state,
                    "restarts": process.restarts,
                    "reason": process.reason or None,
                    "answers": process.answered,
                    "failed": process.failed,
                }
                for process in self.processes
            ]
        return together

    async def _wait_for_ready(self, seconds: float) -> list[VllmProcess]:
        """Wait until a process is ready, and return all that are. Raises EngineAway."""
        if ready := self._ready():
            return ready

        def is_decided() -> bool:
            coming = any(process.state in ("starting", "restarting") for process in self.processes)
            return bool(self._ready()) or not (coming or self._starting)

        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(is_decided)
        except TimeoutError as error:
            raise EngineAway(f"vLLM is not back after {seconds:g} s; /engine/status says why") from error
        if ready := self._ready():
            return ready
        raise EngineAway("vLLM does not run; /engine/status says why")

    def _ready(self) -> list[VllmProcess]:
        return [process for process in self.processes if process.state == "running"]

    async def _start_behind(self, process: VllmProcess) -> None:
        try:
            await process.start(self._source, self._loras)
        except EngineError as error:
            _LOG.error("%s; the other processes continue without it", error)
        finally:
            del self._starting[process]

    async def _drop_starts(self) -> None:
        tasks = list(self._starting.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
