"""The cost of playing episodes in other processes, against the run's own: the agent of `harness.py`.

The model answers at once. It is one in the run's process, which runners ask for samples of, or behind HTTP,
which they sample from themselves. The runners are started before anything is measured.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common import parse_arguments, print_json, print_table, progress, silent
from harness import Setting, config_for, questions
from stub import StubEngine, running_server

from etude.config.schema import Config
from etude.core.example import Example
from etude.core.stats import Estimate, estimate
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder

CONCURRENCY = 16
RUNNERS = 2


@dataclass(frozen=True)
class Cost:
    """Milliseconds for each episode, over several collections."""

    wall: Estimate
    head_cpu: Estimate
    """CPU time of the run's own process."""


def config_of(setting: Setting, isolation: str, base_url: str) -> Config:
    """The harness's config, with its episodes in this process or in others."""
    config = config_for(setting, 8, base_url)
    changes: dict[str, Any] = {"isolation": isolation}
    if isolation == "process":
        changes["runners"] = RUNNERS
    general = config.eval.general.model_copy(update=changes)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"general": general})})


async def collect(setting: Setting, isolation: str, episodes: int, repeats: int, base_url: str) -> Cost:
    """Play and score `repeats` times `episodes` episodes, after as many to warm up."""
    config = config_of(setting, isolation, base_url)
    engines = {"policy": StubEngine()} if setting.transport == "inprocess" else {}
    rows = questions(episodes)
    examples = [Example(row["id"], {"question": row["question"]}) for row in rows]
    walls, cpus = [], []
    with tempfile.TemporaryDirectory() as folder, RunFolder.create(folder, "run") as run:
        async with open_runtime(config, run, engines=engines) as runtime:
            for repeat in range(repeats + 1):
                wall, cpu = time.perf_counter(), time.process_time()
                output = await runtime.evaluation.run(examples, phase=f"eval-{repeat}", keep_episodes=False)
                walls.append(1000 * (time.perf_counter() - wall) / episodes)
                cpus.append(1000 * (time.process_time() - cpu) / episodes)
                if output.failures or len(output.scores()["trivial"]) != episodes:
                    raise SystemExit(f"{setting.name}: {output.failures}, {output.causes}")
    return Cost(estimate(walls[1:]), estimate(cpus[1:]))


def measure_all(quick: bool, note: Callable[[str], None]) -> list[tuple[Setting, str, Cost]]:
    """All settings: in this process, on its event loop and on loops of their own, and in runners."""
    episodes, repeats = (40, 2) if quick else (400, 10)
    costs = []
    with running_server() as base_url:
        for transport in ("inprocess", "http"):
            for calls in (1, 5):
                setting = Setting(transport, calls, CONCURRENCY)
                for isolation in ("none", "thread", "process"):
                    note(f"{setting.name}, isolation: {isolation}")
                    cost = asyncio.run(collect(setting, isolation, episodes // calls, repeats, base_url))
                    costs.append((setting, isolation, cost))
    return costs


def as_json(costs: Sequence[tuple[Setting, str, Cost]]) -> dict[str, Any]:
    """The object that `--json` prints: milliseconds for each episode, as mean, low and high."""

    def shown(value: Estimate) -> list[float]:
        return [round(value.mean, 3), round(value.low, 3), round(value.high, 3)]

    return {
        "runners": RUNNERS,
        "concurrency": CONCURRENCY,
        "settings": [
            {
                "transport": setting.transport,
                "calls": setting.calls,
                "isolation": isolation,
                "n": cost.wall.n,
                "wall_ms": shown(cost.wall),
                "head_cpu_ms": shown(cost.head_cpu),
            }
            for setting, isolation, cost in costs
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or JSON."""
    flags = parse_arguments(str(__doc__), arguments)
    costs = measure_all(flags.quick, silent if flags.json else progress)
    if flags.json:
        print_json(as_json(costs))
        return
    rows = [
        (
            "in the run's process" if setting.transport == "inprocess" else "over HTTP",
            str(setting.calls),
            isolation,
            str(cost.wall),
            str(cost.head_cpu),
        )
        for setting, isolation, cost in costs
    ]
    print_table(
        f"Episodes in {RUNNERS} runners and without, {CONCURRENCY} at a time: ms for each",
        ("model", "calls", "isolation", "wall", "CPU of the run's process"),
        rows,
        ["mean with its 95 % interval over n collections"],
    )


if __name__ == "__main__":
    main()
