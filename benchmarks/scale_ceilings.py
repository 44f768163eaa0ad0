"""How much one head can do: each part by itself, on this machine.

The CPU time is that of the head's two threads, over real connections with runners that are processes of their
own. Differences between long episodes and short ones give what a call costs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_head import Playing, Spent, playing, spent
from scale_runner import ShapedLauncher, Work, conversation, steps_of

from etude.core.episode import EpisodeRecord
from etude.core.example import Example
from etude.core.stats import Estimate, estimate
from etude.inference.routes import Routes
from etude.runners.places import Place
from etude.store.encode import encode_episode
from etude.store.episodes import call_key, read_episode
from etude.store.journal import Journal

SIZES = (1024, 8192)
"""New tokens of a call."""
SHORT, LONG = 1, 5
"""Calls of the episodes whose difference is what a call costs."""
RUNNERS, EACH = 2, 32
KEEPERS = 4
"""Runners of which the heartbeats are measured."""


@dataclass(frozen=True)
class HeadCost:
    """Microseconds of the head, for calls of one size."""

    tokens: int
    call_loop: Estimate
    """Of the thread that talks to the runners, for each call."""
    call_writer: Estimate
    """Of the journal's thread."""
    episode_loop: Estimate
    """For each episode, besides its calls."""
    episode_writer: Estimate
    calls_per_s: Estimate
    """As many as were committed in a second, the runners being processes of the same machine."""


async def _in_new_pool(work: Work, measure: Callable[[Playing], Awaitable[Any]]) -> Any:
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
        async with playing(journal, ShapedLauncher(work), runners=RUNNERS, episodes_each=EACH) as started:
            return await measure(started)


def measure_head(tokens: int, episodes: int, repeats: int) -> HeadCost:
    """The cost of calls and episodes at the head: short and long episodes in turns."""

    async def repeated(started: Playing) -> list[Spent]:
        await started.play(episodes)  # Starts the runners.
        costs = []
        for _ in range(repeats):
            before = spent(started.journal)
            await started.play(episodes)
            costs.append(spent(started.journal) - before)
        return costs

    short, long = (asyncio.run(_in_new_pool(Work(calls, tokens), repeated)) for calls in (SHORT, LONG))

    def split(of: Callable[[Spent], float]) -> tuple[Estimate, Estimate]:
        calls = [(of(b) - of(a)) / (LONG - SHORT) for a, b in zip(short, long, strict=True)]
        others = [of(a) - SHORT * call for a, call in zip(short, calls, strict=True)]
        return tuple(estimate([1e6 * each / episodes for each in part]) for part in (calls, others))

    call_loop, episode_loop = split(lambda cost: cost.loop)
    call_writer, episode_writer = split(lambda cost: cost.writer)
    rates = estimate([LONG * episodes / cost.wall for cost in long])
    return HeadCost(tokens, call_loop, call_writer, episode_loop, episode_writer, rates)


@dataclass(frozen=True)
class JournalCost:
    """The speed of the journal alone."""

    tokens: int
    at_once: int
    """Steps that wait to be committed."""
    bytes_each: int
    steps_per_s: Estimate
    writer_us: Estimate
    """Microseconds of its thread, for each step."""


def measure_journal(tokens: int, at_once: int, steps: int, repeats: int) -> JournalCost:
    """Commits of calls, as fast as they go."""
    value = [*steps_of(Work(2, tokens)).values()][1]

    async def committed() -> list[Spent]:
        numbers, costs = itertools.count(), []
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:

            async def put(waiting: Any) -> None:
                for _ in waiting:
                    await journal.put(call_key(f"train/1/q{next(numbers)}/0", "turn1/0"), value)

            for _ in range(repeats + 1):
                before, waiting = spent(journal), iter(range(steps))
                await asyncio.gather(*(put(waiting) for _ in range(at_once)))
                costs.append(spent(journal) - before)
        return costs[1:]

    costs = asyncio.run(committed())
    return JournalCost(
        tokens,
        at_once,
        len(json.dumps(value)),
        estimate([steps / cost.wall for cost in costs]),
        estimate([1e6 * cost.writer / steps for cost in costs]),
    )


def measure_beats(seconds: float, repeats: int) -> Estimate:
    """Microseconds of the head in a second, for each runner that has nothing to do."""

    async def idle() -> list[float]:
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
            launcher = ShapedLauncher(Work(1, 16))
            async with playing(journal, launcher, runners=KEEPERS, episodes_each=1) as started:
                await started.play(4 * KEEPERS)
                costs = []
                for _ in range(repeats):
                    before = spent(journal)
                    await asyncio.sleep(seconds)
                    cost = spent(journal) - before
                    costs.append(1e6 * cost.loop / cost.wall / KEEPERS)
                return costs

    return estimate(asyncio.run(idle()))


def measure_memory(episodes: int, repeats: int) -> Estimate:
    """Kilobytes of the head for each episode that is under way, without what it has committed."""
    work = Work(1, 16, seconds=1e6, spread=0.0)

    async def once() -> float:
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
            launcher, each = ShapedLauncher(work), episodes // RUNNERS + 1
            async with playing(journal, launcher, runners=RUNNERS, episodes_each=each) as started:
                tracemalloc.start()
                collecting = asyncio.ensure_future(started.play(episodes))
                await asyncio.sleep(3 + episodes / 500)
                used, _ = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                collecting.cancel()
                await asyncio.gather(collecting, return_exceptions=True)
        return used / episodes / 1000

    return estimate([asyncio.run(once()) for _ in range(repeats)])


def measure_record(calls: int, tokens: int, episodes: int, repeats: int) -> Estimate:
    """Kilobytes of the head for each episode that is over and is kept until its epoch is trained on."""
    steps = steps_of(Work(calls, tokens))

    async def once() -> float:
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
            for number in range(episodes):
                record = EpisodeRecord(
                    f"q{number}", Example(f"q{number}"), 0, tuple(conversation(Work(calls, 2)))
                )
                puts = [journal.put(call_key(record.id, name), step) for name, step in steps.items()]
                await asyncio.gather(
                    *puts, journal.put(record.id, encode_episode(record, dict(enumerate(steps))))
                )
            tracemalloc.start()
            records = [read_episode(journal, f"q{number}") for number in range(episodes)]
            used, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert all(records)
            return used / episodes / 1000

    return estimate([asyncio.run(once()) for _ in range(repeats)])


def measure_places(places: int, waiting: int, repeats: int, times: int = 20) -> Estimate:
    """Microseconds in which an episode leaves its place among so many and another takes it.

    All places are taken, and `waiting` more episodes wait for one.
    """

    async def once() -> float:
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
            async with playing(journal, ShapedLauncher(Work()), runners=places, episodes_each=1) as started:
                taken: asyncio.Queue[AbstractAsyncContextManager[Place]] = asyncio.Queue()

                async def come() -> None:
                    place = started.pool.places.take(alone=False)
                    await place.__aenter__()
                    taken.put_nowait(place)

                coming = [asyncio.ensure_future(come()) for _ in range(places + waiting)]
                held = [await taken.get() for _ in range(places)]
                begun = time.thread_time()
                for place in held[:times]:
                    await place.__aexit__(None, None, None)
                    coming.append(asyncio.ensure_future(come()))
                    await taken.get()
                cost = time.thread_time() - begun
                for task in coming:
                    task.cancel()
                await asyncio.gather(*coming, return_exceptions=True)
                return 1e6 * cost / min(times, places)

    return estimate([asyncio.run(once()) for _ in range(repeats)])


def _microseconds(do: Callable[[int], object], times: int, repeats: int) -> Estimate:
    costs = []
    for repeat in range(repeats):
        begun = time.thread_time()
        for number in range(times):
            do(repeat * times + number)
        costs.append(1e6 * (time.thread_time() - begun) / times)
    return estimate(costs)


def measure_routes(addresses: int, times: int, repeats: int) -> dict[str, Estimate]:
    """Microseconds in which an address is chosen: for a new conversation, and for one that has its home."""
    routes = Routes([f"http://node{number}:8000/v1" for number in range(addresses)])
    new = _microseconds(lambda number: routes.choose(f"train/1/q{number}/0"), times, repeats)

    def call(number: int) -> None:
        with routes.call(f"train/1/q{number % (times * repeats)}/0"):
            pass

    return {"new": new, "next": _microseconds(call, times, repeats)}


def frame_bytes(tokens: int) -> int:
    """Bytes on the head's network for a call that a runner has sampled: the step, and its receipt."""
    name, step = [*steps_of(Work(2, tokens)).items()][1]
    asked = ["ask", 10_000, "put", {"key": call_key("train/1/q1000/0", name), "value": step}]
    return sum(4 + len(json.dumps(each, separators=(",", ":"))) for each in (asked, ["answer", 10_000, None]))
