"""Several vLLM processes of one model, one per device, used as one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from etude.core.errors import EngineAway, EngineError
from etude.engines.vllm_process import VllmProcess

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

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that requests to any process need."""
        return self.processes[0].headers

    async def start(self, source: str, *, in_place: bool = False) -> None:
        """Serve `source`; return once requests are answered.

        With `in_place`, running processes load the weights without a restart, if they can. The weights must
        have the same shapes, and no request may be running. Raises EngineError if a process does not start,
        and then stops the others.
        """
        if source == self._source:
            await self._wait_for_ready(self.processes[0].options.start_seconds)
            return
        self._source = ""
        starts = (each.change_to(source) if in_place else each.start(source) for each in self.processes)
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        if failures := [outcome for outcome in outcomes if outcome is not None]:
            await self.stop()
            raise failures[0]
        self._source = source

    async def stop(self) -> None:
        """End all processes and forget their LoRA weights."""
        self._source = ""
        await asyncio.gather(*(process.stop() for process in self.processes))

    async def add_lora(self, name: str, folder: Path) -> None:
        """Load LoRA weights under a name never used before, in every process that runs.

        Raises EngineError if one of them refuses, or none runs.
        """
        loads = (process.add_lora(name, folder) for process in self.processes)
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures or True not in outcomes:
            await self.remove_lora(name)
            raise next(iter(failures), EngineError("vLLM does not run"))

    async def remove_lora(self, name: str) -> None:
        """Unload LoRA weights everywhere; ignore those that are not loaded."""
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
            return bool(self._ready()) or not coming

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
