"""The cost of a tool call through an episode, against the bare `mcp` client: `python benchmarks/tools.py`.

Both call the same tool of the same kind of server, in turns, so that a busy machine is busy for both. Prints
JSON: milliseconds per call (medians) and their difference, `overhead_ms_per_turn`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client

from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError
from etude.core.example import Example
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.reply import ToolCall
from etude.rollout.workflow import as_workflow
from etude.store.journal import Journal

SERVER = Path(__file__).parents[1] / "examples" / "calculator" / "server.py"
ROUNDS, CALLS = 20, 20


class NoModel:
    """The tool calls here are written by hand."""

    version = 0

    async def complete(self, request: ChatRequest) -> Completion:
        raise EngineError("this benchmark has no model")

    async def adopt(self, version: Any) -> None:
        raise EngineError("this benchmark has no model")

    async def close(self) -> None:
        pass


async def timed(call: Callable[[int], Awaitable[Any]], number: int) -> float:
    """Milliseconds that a call takes."""
    begun = time.perf_counter()
    await call(number)
    return (time.perf_counter() - begun) * 1000


async def measure() -> dict[str, Any]:
    """Milliseconds per call, both ways."""
    bare_ms: list[float] = []
    episode_ms: list[float] = []
    parameters = StdioServerParameters(command=sys.executable, args=[str(SERVER)])

    async with Client(stdio_client(parameters), cache=None) as client:

        async def workflow(example: Example, episode: Any) -> str:
            async with episode.tools("calculator") as tools:

                async def through_episode(number: int) -> Any:
                    arguments = {"expression": f"{number}+1"}
                    return await tools.call(ToolCall("call", "calculator", arguments, json.dumps(arguments)))

                async def bare(number: int) -> Any:
                    return await client.call_tool("calculator", {"expression": f"{number}+1"})

                for turn in range(ROUNDS):
                    numbers = range(turn * CALLS, (turn + 1) * CALLS)
                    bare_ms.extend([await timed(bare, number) for number in numbers])
                    episode_ms.extend([await timed(through_episode, number) for number in numbers])
            return "done"

        server = {"_type": "mcp", "command": "python", "args": [str(SERVER)], "max_calls": 10**6}
        config = parse_config({"tools": {"calculator": server}})
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
            async with Builder(config) as builder:
                tools = {"calculator": await builder.get_tools("calculator")}
                collector = Collector(
                    as_workflow(workflow),
                    {"none": NoModel()},
                    journal,
                    tools=tools,
                    limits=Limits(timeout=None),
                )
                record = await collector.run(EpisodeJob("bench/0/0", Example("0", {})))
    if record.failure is not None:
        raise SystemExit(record.failure.reason)
    medians = {"bare": statistics.median(bare_ms), "episode": statistics.median(episode_ms)}
    return {
        "calls": len(bare_ms),
        "ms_per_call": {name: round(value, 3) for name, value in medians.items()},
        "overhead_ms_per_turn": round(medians["episode"] - medians["bare"], 3),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure()), indent=2))
