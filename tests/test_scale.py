"""The simulation of many nodes does what can be reckoned."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scale")


def test_a_virtual_hour_takes_no_time_and_keeps_its_order(scale: ModuleType):
    async def main(loop: asyncio.AbstractEventLoop) -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def wait(name: str, *seconds: float) -> None:
            for each in seconds:
                await asyncio.sleep(each)
                seen.append((name, loop.time()))

        await asyncio.gather(wait("a", 1800, 1800), wait("b", 2000, 0.5))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.sleep(61)
        return seen

    assert scale.run_virtually(main) == [("a", 1800), ("b", 2000), ("b", 2000.5), ("a", 3600)]


COSTS = {"call": 0.001, "episode": 0.002, "beat": 0.0, "step": 0.0001, "start": 0.0, "latency": 0.01}


def test_five_simulated_nodes_do_what_can_be_reckoned(scale: ModuleType):
    work = scale.Work(calls=4, tokens=1024, seconds=2.0, spread=0.0)
    setting = scale.Setting(5, 2, work, rounds=4.0)
    outcome = scale.simulate(setting, scale.Costs(**COSTS))
    # An episode: there and back, four answers each with its commit, and two more commits.
    commit, episodes = 2 * 0.01 + 0.001, 10 * 4
    assert outcome.waits[0] == pytest.approx(commit, abs=0.01)
    assert outcome.seconds == pytest.approx(4 * (4 * (2.0 + commit) + 3 * 2 * 0.01), rel=0.02)
    per_call = 0.001 + 0.002 / 4
    assert outcome.head == pytest.approx(outcome.calls_per_s * per_call, rel=0.25)
    assert (outcome.played_again, outcome.calls_again) == (0, 0)
    # Each runner is looked at four times a second.
    assert outcome.beats == pytest.approx(5 * 4 * outcome.seconds, rel=0.05)
    again = scale.simulate(setting, scale.Costs(**COSTS))
    assert (again.seconds, again.waits, again.head) == (outcome.seconds, outcome.waits, outcome.head)
    assert episodes == setting.rounds * setting.at_once
