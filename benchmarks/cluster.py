"""Episodes on a Ray cluster of several raylets on this machine: how fast, and what survives kill -9.

Parts, by `--only`: `efficiency` (agents that wait, in 1, 2 and 4 runners), `overhead` (one runner against no
Ray), `journal` (calls that the run's process commits).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import print_json, print_table, progress, silent
from harness import Setting, StubEngine, config_data, questions, server_process

from etude.config.builder import Builder
from etude.config.component import LlmConfig
from etude.config.load import parse_config
from etude.config.registry import register_llm
from etude.config.schema import Config
from etude.core.episode import Example
from etude.core.job import ModelVersion
from etude.core.stats import estimate
from etude.runtime import Runtime, open_runtime
from etude.store.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1]))  # The cluster is the tests'.

from tests.processes.nodes import start_cluster

HERE = Path(__file__).parent

AT_ONCE = 8
"""Episodes that a runner plays at a time."""
CALLS = 2
LATENCY = 0.5
"""Mean seconds that the model of agents that wait takes to answer."""
COUNTS = (1, 2, 4)
"""Of runners."""

_LIMIT_SECONDS = 900.0
"""For a part."""

Note = Callable[[str], None]


class AtOnceEngine(StubEngine):
    """The model that answers at once, which each runner builds for itself."""

    adopted: ModelVersion | None = None


class AtOnceConfig(LlmConfig, name="cluster_rates_at_once"):
    """Of that model."""


@register_llm(config_type=AtOnceConfig)
async def at_once(config: AtOnceConfig, builder: Builder) -> AsyncIterator[AtOnceEngine]:
    """A model that answers at once."""
    yield AtOnceEngine()


@dataclass(frozen=True)
class Place:
    """Where episodes are played, and how many at a time."""

    name: str
    """`none` (the run's own process), `process` (others without Ray) or `ray`."""
    runners: int = 1
    each: int = AT_ONCE

    @property
    def at_once(self) -> int:
        """Episodes at a time, in all runners together: as many as each of them plays limit it."""
        return self.runners * self.each

    def config(self, llm: dict[str, Any], calls: int, address: str) -> Config:
        """A config whose episodes are played here; `address` is the cluster's."""
        data = config_data(Setting("http", calls, self.at_once), 8, "http://unused")
        data["llms"]["policy"] = data["llms"]["policy"] | llm if "base_url" in llm else llm
        if self.name == "process":
            data["eval"]["general"] |= {"isolation": "process", "runners": self.runners}
        if self.name == "ray":
            data["cluster"] = {"_type": "ray", "address": address, "runners": self.runners}
            # Its folder is sent to the nodes.
            data.setdefault("finetuning", {})["run_configuration"] = {"config_file": str(HERE / "config.yml")}
        return parse_config(data)


class Arm:
    """A runtime that stays open, and plays a number of episodes when it is asked to."""

    def __init__(self, place: Place, runtime: Runtime, calls: int) -> None:
        self.place = place
        self._runtime = runtime
        self._calls = calls
        self._collections = 0

    async def collect(self, episodes: int) -> Spent:
        """Play and score so many episodes; the first collection starts the runners."""
        examples = [Example(row["id"], {"question": row["question"]}) for row in questions(episodes)]
        phase = f"eval-{self._collections}"
        self._collections += 1
        wall, cpu = time.perf_counter(), time.process_time()
        output = await self._runtime.evaluation.run(examples, phase=phase, keep_episodes=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if output.failures or len(output.scores()["trivial"]) != episodes:
            raise SystemExit(f"{self.place}: {output.failures}, {output.causes}")
        committed = sum("/call/" in key for key, _ in self._runtime.run.journal.scan(f"{phase}/"))
        if committed != episodes * self._calls:
            raise SystemExit(f"{self.place}: {committed} calls in the journal for {episodes} episodes")
        return Spent(episodes, self._calls, wall, cpu)


@dataclass(frozen=True)
class Spent:
    """The cost of a collection."""

    episodes: int
    calls: int
    """Of each."""
    wall: float
    head_cpu: float
    """CPU seconds of the run's own process."""

    @property
    def rate(self) -> float:
        """Episodes a second."""
        return self.episodes / self.wall


@asynccontextmanager
async def open_arms(
    places: Sequence[Place], llm: dict[str, Any], calls: int, address: str
) -> AsyncIterator[list[Arm]]:
    """A runtime for each place, all open at once and their runners started: then they can take turns."""
    async with AsyncExitStack() as exits:
        arms = []
        for number, place in enumerate(places):
            folder = exits.enter_context(TemporaryDirectory())
            run = exits.enter_context(RunFolder.create(folder, f"run-{number}"))
            config = place.config(llm, calls, address)
            arm = Arm(place, await exits.enter_async_context(open_runtime(config, run)), calls)
            await arm.collect(place.at_once)
            arms.append(arm)
        yield arms


async def turns(arms: Sequence[Arm], episodes: Callable[[Place], int], repeats: int) -> list[list[Spent]]:
    """`repeats` collections of each arm, in turns and in both orders: what changes slowly hits all."""
    spent: list[list[Spent]] = [[] for _ in arms]
    for repeat in range(repeats):
        order = list(enumerate(arms))
        for place, arm in order if repeat % 2 else reversed(order):
            spent[place].append(await arm.collect(episodes(arm.place)))
    return spent


def interval(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Mean and 95 % interval, by Student's t whatever the values are."""
    scaled = estimate([1000 * value for value in values])
    low, high = (round(each / 1000, digits) if isfinite(each) else None for each in (scaled.low, scaled.high))
    return {"mean": round(scaled.mean / 1000, digits), "low": low, "high": high, "n": scaled.n}


async def efficiency(address: str, quick: bool, note: Note) -> dict[str, Any]:
    """Episodes a second of agents that wait, with 1, 2 and 4 runners."""
    rounds, repeats = (3, 2) if quick else (12, 6)
    places = [Place("none"), Place("process"), *(Place("ray", count) for count in COUNTS)]
    note(f"agents that wait, in {', '.join(map(str, COUNTS))} runners")
    with server_process(LATENCY) as (url, _):
        async with open_arms(places, {"base_url": url}, CALLS, address) as arms:
            spent = await turns(arms, lambda place: rounds * place.at_once, repeats)
    none, process, *on_ray = spent
    alone = on_ray[0]

    def share(of: list[Spent], count: int, against: list[Spent]) -> dict[str, Any]:
        return interval([a.rate / (count * b.rate) for a, b in zip(of, against, strict=True)])

    rates = {
        str(count): interval([each.rate for each in on]) for count, on in zip(COUNTS, on_ray, strict=True)
    }
    return {
        "efficiency": {
            str(count): share(on, count, alone) for count, on in zip(COUNTS, on_ray, strict=True) if count > 1
        },
        "episodes_per_s": rates,
        "share_of_rate_without_ray": {"process": share(alone, 1, process), "none": share(alone, 1, none)},
        "settings": {"at_once_each": AT_ONCE, "calls": CALLS, "latency_s": LATENCY, "rounds": rounds},
    }


async def overhead(address: str, quick: bool, note: Note) -> dict[str, Any]:
    """Milliseconds of an episode with one call to a model that answers at once, in one runner."""
    episodes, repeats = (100, 2) if quick else (400, 10)
    places = [Place("none", each=16), Place("process", each=16), Place("ray", each=16)]
    note("the cost of an episode in one runner")
    with server_process() as (url, _):
        async with open_arms(places, {"base_url": url}, 1, address) as arms:
            spent = await turns(arms, lambda place: episodes, repeats)
    walls = [[1000 * each.wall / each.episodes for each in of] for of in spent]
    cpus = [[1000 * each.head_cpu / each.episodes for each in of] for of in spent]
    names = [place.name for place in places]
    return {
        "wall_ms_per_episode": {name: interval(of) for name, of in zip(names, walls, strict=True)},
        "head_cpu_ms_per_episode": {name: interval(of) for name, of in zip(names, cpus, strict=True)},
        "more_wall_ms_than_without_ray": interval([a - b for a, b in zip(walls[2], walls[1], strict=True)]),
        "settings": {"episodes": episodes, "at_once": places[0].at_once, "calls": 1},
    }


async def journal(address: str, quick: bool, note: Note) -> dict[str, Any]:
    """Calls a second that the run's process commits for two runners, whose model answers at once there."""
    episodes, repeats, calls = (60, 2, 10) if quick else (200, 10, 10)
    note("calls committed for two runners")
    async with open_arms([Place("ray", 2, 16)], {"_type": "cluster_rates:at_once"}, calls, address) as arms:
        (spent,) = await turns(arms, lambda place: episodes, repeats)
    return {
        "journal_calls_per_s": interval([calls * each.rate for each in spent], 1),
        "head_cpu_ms_per_call": interval([1000 * each.head_cpu / (each.episodes * calls) for each in spent]),
        "settings": {"runners": 2, "at_once_each": 16, "calls": calls, "episodes": episodes},
    }


PARTS = {"efficiency": efficiency, "overhead": overhead, "journal": journal}


def measure_rates(names: Sequence[str], quick: bool, note: Note) -> dict[str, dict[str, Any]]:
    """These parts, each on a cluster of its own with two nodes beside the head."""

    async def within_limit(name: str, address: str) -> dict[str, Any]:
        async with asyncio.timeout(_LIMIT_SECONDS):
            return await PARTS[name](address, quick, note)

    results = {}
    for name in names:
        # Room for the runners of all places at once: those whose turn it is not only wait.
        with start_cluster(4, 4) as cluster:
            results[name] = asyncio.run(within_limit(name, cluster.address))
    return results


Part = Mapping[str, Any]


def as_json(parts: Mapping[str, Part]) -> dict[str, Any]:
    """The object that `--json` prints: the figures that are compared first, and all of each part."""
    rates, commits = (parts.get(name) for name in ("efficiency", "journal"))
    shares = {count: share["mean"] for count, share in rates["efficiency"].items()} if rates else None
    return {
        "efficiency": shares,
        "journal_calls_per_s": commits["journal_calls_per_s"]["mean"] if commits else None,
        "parts": parts,
    }


def figures(part: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """The measured values of a part, with their names."""
    rows = []
    for name, value in part.items():
        if isinstance(value, Mapping) and "mean" in value:
            rows.append((prefix + name, value))
        elif isinstance(value, Mapping):
            rows += figures(value, f"{prefix}{name}, ")
    return rows


def print_rates(name: str, part: Mapping[str, Any]) -> None:
    """A table of one part."""
    rows = [
        (what.replace("_", " "), f"{value['mean']:g} [{value['low']}, {value['high']}]", str(value["n"]))
        for what, value in figures(part)
    ]
    settings = ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in part["settings"].items())
    print_table(name, ("", "mean [95 %]", "n"), rows, [settings])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__))
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="measure less, and less exactly")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts that the command line names, and print tables or JSON."""
    flags = parse(arguments)
    wanted, note = flags.only or PARTS, silent if flags.json else progress
    parts = measure_rates([name for name in PARTS if name in wanted], flags.quick, note)
    if flags.json:
        print_json(as_json(parts), {}, "95 %")
        return
    for name, part in parts.items():
        print_rates(name, part)


if __name__ == "__main__":
    main()
