"""A hundred thousand episodes in one process, whose memory has to stay as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import etude
from etude.config.load import parse_config
from etude.core.episode import EpisodeRecord
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder
from tests.support import EchoEngine

Note = Callable[[str], None]

_EXAMPLES = 1000
_PARTS = 10
_WARM_UP = 2
"""Generations of all examples that are not counted: caches fill, and the allocator takes what it keeps."""


def rows() -> list[dict[str, Any]]:
    """The data set."""
    return [{"id": f"e{number}", "question": str(number)} for number in range(_EXAMPLES)]


@etude.workflow
async def ask(example: etude.Example, episode: etude.Episode) -> str:
    """One call."""
    return (await episode.chat([{"role": "user", "content": example.inputs["question"]}])).text


@etude.evaluator
def length(example: etude.Example, output: str) -> float:
    """Something to score."""
    return float(len(output))


def soak(folder: Path, episodes: int, note: Note) -> dict[str, Any]:
    """The most resident memory in each tenth of so many episodes of one evaluation, in megabytes."""
    note(f"{episodes} episodes, one call each")
    return asyncio.run(_soak(folder, episodes))


async def _soak(folder: Path, episodes: int) -> dict[str, Any]:
    config = parse_config(
        {
            "llms": {"policy": {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9"}},
            "workflow": "tests.chaos.soak:ask",
            "eval": {
                "general": {"dataset": "tests.chaos.soak:rows", "max_concurrency": 16},
                "evaluators": {"length": "tests.chaos.soak:length"},
            },
        }
    )
    process, most, seen, is_warm = psutil.Process(), [0.0] * _PARTS, 0, False

    def finished(episode: EpisodeRecord) -> None:
        nonlocal seen
        part = min(_PARTS - 1, seen * _PARTS // episodes)
        seen += is_warm
        if is_warm and seen % 100 == 0:
            most[part] = max(most[part], process.memory_info().rss / 2**20)

    with RunFolder.create(folder, "soak") as run:
        async with open_runtime(config, run, engines={"policy": EchoEngine()}) as runtime:
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
