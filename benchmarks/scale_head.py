"""The head of a run with runners whose episodes are only waited for, and what it costs this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_runner import EVALUATOR
from stub import StubEngine

from etude.budget.ledger import Ledger
from etude.config.schema import Config
from etude.core.example import Example
from etude.rewards.scorer import Scorer
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.workflow import Workflow
from etude.runners.head import Head
from etude.runners.pool import RunnerPool
from etude.runners.process import Launcher
from etude.store.journal import Journal


@dataclass
class Playing:
    """A pool of runners with its journal, and what collects episodes from it."""

    journal: Journal
    pool: RunnerPool
    collector: Collector
    numbers: Iterator[int]

    async def play(self, episodes: int) -> None:
        """Have so many new episodes played, as many at a time as there is room for."""
        jobs = (
            EpisodeJob(f"train/1/q{number}/0", Example(f"q{number}", {"question": "why?"}))
            for number in itertools.islice(self.numbers, episodes)
        )
        async with aclosing(self.collector.collect(jobs)) as records:
            async for record in records:
                if record.failure is not None:
                    raise SystemExit(f"{record.id}: {record.failure}")


async def _unused(example: Any, episode: Any) -> None:
    """Runners play the workflow."""


def _never(example: Any, output: Any) -> float:
    """Runners score."""
    raise AssertionError


@asynccontextmanager
async def playing(
    journal: Journal, launcher: Launcher, *, runners: int, episodes_each: int
) -> AsyncIterator[Playing]:
    """A pool of runners, which are started when episodes need them."""
    at_once = runners * episodes_each
    head = Head(journal, {}, frozenset(), patience=3600.0, memory=None, ledger=Ledger(journal, Config()))
    scorer = Scorer({EVALUATOR: _never}, journal, timeout=60.0, max_concurrency=at_once)
    limits = Limits(at_once, None)
    async with RunnerPool(head, launcher, scorer, {}, runners=runners, episodes_each=episodes_each) as pool:
        collector = Collector(
            Workflow("shaped", _unused), {"policy": StubEngine()}, journal, limits=limits, runner=pool
        )
        yield Playing(journal, pool, collector, itertools.count())


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a head, or between two moments of one."""

    loop: float
    """Of the thread that talks to the runners."""
    writer: float
    """Of the thread that writes the journal."""
    wall: float

    def __sub__(self, before: Spent) -> Spent:
        return Spent(self.loop - before.loop, self.writer - before.writer, self.wall - before.wall)


def spent(journal: Journal) -> Spent:
    """CPU time that this thread and the journal's have used so far (Linux)."""
    assert journal._writer is not None
    writer = journal._writer._thread.ident
    assert writer is not None
    clock = time.pthread_getcpuclockid(writer)
    return Spent(time.thread_time(), time.clock_gettime(clock), time.perf_counter())


def rss_bytes() -> int:
    """Resident memory of this process now (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1]) * 1024
