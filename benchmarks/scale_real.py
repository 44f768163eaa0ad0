"""The same work in real runners and in simulated ones: how far the simulation is off."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from scale_head import Playing, Spent, playing, spent
from scale_runner import OTHER_STEPS, ShapedLauncher, Work
from scale_simulation import EDGE, Costs, Setting, simulate

from etude.core.stats import Estimate, estimate
from etude.store.journal import Journal

WORK = Work(calls=5, tokens=1024, seconds=0.1)
EACH = 16
LOCAL = {"start": 0.0, "latency": 0.00005}
"""Of the costs, those that are others between processes of one machine."""


@dataclass(frozen=True)
class Point:
    """So many runners, on this machine and simulated."""

    runners: int
    calls_per_s: Estimate
    """On this machine."""
    simulated_calls_per_s: float
    head_us: Estimate
    """Microseconds of the head's loop for each call, all else of an episode included."""
    simulated_head_us: float
    """The same, with the journal's thread."""

    @property
    def error(self) -> float:
        """Of the simulated calls per second, as a share of the real ones."""
        return self.simulated_calls_per_s / self.calls_per_s.mean - 1


async def _middle(started: Playing, setting: Setting) -> Spent:
    """CPU and wall time in which the middle of the steps of all episodes are committed."""
    episodes = int(setting.rounds * setting.at_once)
    steps, before = episodes * (setting.work.calls + OTHER_STEPS), started.journal.committed
    going = asyncio.ensure_future(started.play(episodes))
    marks: list[Spent] = []
    for share in (EDGE, 1 - EDGE):
        while started.journal.committed - before < share * steps:  # noqa: ASYNC110  a count that nobody tells of
            await asyncio.sleep(0.002)
        marks.append(spent(started.journal))
    await going
    return marks[1] - marks[0]


async def _play(setting: Setting, repeats: int) -> list[Spent]:
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
        launcher = ShapedLauncher(setting.work)
        async with playing(journal, launcher, runners=setting.nodes, episodes_each=setting.each) as started:
            await started.play(2 * setting.at_once)
            return [await _middle(started, setting) for _ in range(repeats)]


def compare(runners: int, costs: Costs, rounds: float, repeats: int, each: int = EACH) -> Point:
    """The same setting here and simulated."""
    setting = Setting(runners, each, WORK, rounds)
    middles = asyncio.run(_play(setting, repeats))
    calls = (1 - 2 * EDGE) * int(rounds * setting.at_once) * WORK.calls
    outcome = simulate(setting, replace(costs, **LOCAL))
    return Point(
        runners,
        estimate([calls / middle.wall for middle in middles]),
        outcome.calls_per_s,
        estimate([1e6 * middle.loop / calls for middle in middles]),
        1e6 * outcome.head / outcome.calls_per_s,
    )
