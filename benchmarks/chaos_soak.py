"""A hundred thousand episodes in one process, whose memory has to stay as it is: a part of `chaos.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from harness import Setting, config_for
from stub import StubEngine

from etude.core.episode import EpisodeRecord
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder

Note = Callable[[str], None]

_EXAMPLES = 1000
_PARTS = 10
_WARM_UP = 2
"""Generations of all examples that are not counted: caches fill, and the allocator takes what it keeps."""


def soak(folder: Path, episodes: int, note: Note) -> dict[str, Any]:
    """The most resident memory in each tenth of so many episodes of one evaluation, in megabytes."""
    note(f"{episodes} episodes, one call each")
    return asyncio.run(_soak(folder, episodes))


async def _soak(folder: Path, episodes: int) -> dict[str, Any]:
    config = config_for(Setting("inprocess", 1, 16), _EXAMPLES, "http://127.0.0.1:9")
    process, most, seen, is_warm = psutil.Process(), [0.0] * _PARTS, 0, False

    def finished(episode: EpisodeRecord) -> None:
        nonlocal seen
        part = min(_PARTS - 1, seen * _PARTS // episodes)
        seen += is_warm
        if is_warm and seen % 100 == 0:
            most[part] = max(most[part], process.memory_info().rss / 2**20)

    with RunFolder.create(folder, "soak") as run:
        async with open_runtime(config, run, engines={"policy": StubEngine()}) as runtime:
            for number in range(_WARM_UP + episodes // _EXAMPLES):
                is_warm = number >= _WARM_UP
                await runtime.evaluation.run(
                    runtime.examples, phase=f"soak/{number}", on_episode=finished, keep_episodes=False
                )
    return {
        "episodes": seen,
        "warm_up_episodes": _WARM_UP * _EXAMPLES,
        "memory_mb_by_tenth": [round(value, 1) for value in most],
        "last_tenth_over_first": round(most[-1] / most[0], 3),
    }
