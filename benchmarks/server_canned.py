"""The cost of `etude serve` alone: CPU time of its process and wall time for a chat, in front of a vLLM that
has no model and answers at once. Part of server.py."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from canned_vllm import TOKENS

BATCH = 50
"""Chats between two looks at a process's CPU time."""
_WARM = 4
"""Batches before the first that counts."""


@dataclass(frozen=True)
class Place:
    """Where requests are sent, and under which name the model goes there."""

    name: str
    url: str
    model: str
    key: str = "none"
    pid: int = 0
    """Of its process, where that is known."""

    def chat(self, seed: int) -> dict[str, Any]:
        """A request for so many tokens, with their logprobs and ids."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": "what is 1 + 2?"}],
            "max_tokens": TOKENS,
            "logprobs": True,
            "return_token_ids": True,
            "seed": seed,
        }


@dataclass(frozen=True)
class Taken:
    """Milliseconds: the wall time of each chat, and the CPU time of one of each batch on average."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def canned_command(folder: Path) -> Path:
    """A program that takes the place of vLLM's."""
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).parent}/canned_vllm.py" "$@"\n')
    program.chmod(0o700)
    return program


def measure(
    places: Mapping[str, Place], batches: int, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Of each place, by its name: medians over batches that take turns, and over all their chats."""
    say(f"{batches} batches of {BATCH} chats at each of {', '.join(places)}")
    return asyncio.run(_measure(places, batches))


async def _measure(places: Mapping[str, Place], batches: int) -> dict[str, dict[str, Any]]:
    taken = {name: Taken() for name in places}
    clients = {name: _client(place) for name, place in places.items()}
    order: Sequence[str] = list(places)
    try:
        for number in range(-_WARM, batches):
            for name in order if number % 2 else reversed(order):
                await _batch(clients[name], places[name], taken[name] if number >= 0 else Taken())
    finally:
        for client in clients.values():
            await client.aclose()
    return {
        name: {
            "ms_p50": statistics.median(one.wall),
            "cpu_ms_p50": statistics.median(one.cpu),
            "cpu_ms_best": min(one.cpu),
            "chats": len(one.wall),
        }
        for name, one in taken.items()
    }


def _client(place: Place) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=place.url, headers={"authorization": f"Bearer {place.key}"}, timeout=60)


async def _batch(client: httpx.AsyncClient, place: Place, taken: Taken) -> None:
    before = _cpu_seconds(place.pid)
    for number in range(BATCH):
        start = time.perf_counter()
        reply = await client.post("/v1/chat/completions", json=place.chat(number))
        taken.wall.append(1e3 * (time.perf_counter() - start))
        reply.raise_for_status()
        if len(reply.json()["choices"][0]["token_ids"]) != TOKENS:
            sys.exit(f"{place.url} did not answer with {TOKENS} tokens: {reply.text:.300}")
    taken.cpu.append(1e3 * (_cpu_seconds(place.pid) - before) / BATCH)


def _cpu_seconds(pid: int) -> float:
    """The CPU time of all threads of another process (Linux's clock of it; clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)
