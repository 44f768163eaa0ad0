"""The benchmark of scale measures what it says."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from etude.store.episodes import iter_episodes
from etude.store.journal import Journal

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def shaped(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scale_runner")


def test_a_shaped_runner_commits_whole_episodes(shaped: ModuleType, tmp_path: Path):
    head = importlib.import_module("scale_head")
    work = shaped.Work(calls=3, tokens=16)

    async def play() -> None:
        with Journal(tmp_path / "run.db") as journal:
            launcher = shaped.ShapedLauncher(work)
            async with head.playing(journal, launcher, runners=1, episodes_each=2) as started:
                before = head.spent(journal)
                await started.play(4)
                cost = head.spent(journal) - before
            assert cost.loop > 0 and cost.writer > 0
            episodes = list(iter_episodes(journal))
            assert len(episodes) == 4
            for episode in episodes:
                # Each call goes on from the one before it, token for token.
                assert [len(call.completion.prompt_ids) for call in episode.calls] == [8, 24, 40]
            assert len(list(journal.scan())) == 4 * (work.calls + shaped.OTHER_STEPS)

    asyncio.run(play())


def test_a_call_has_the_size_of_its_tokens(shaped: ModuleType):
    ceilings = importlib.import_module("scale_ceilings")
    second = [*shaped.steps_of(shaped.Work(2, 1024)).values()][1]
    # 5.3 bytes for an id, 10.7 for a logprob, 4 for the text of a token.
    expected = 1024 * (16 / 3 + 4) + 512 * 32 / 3
    assert len(json.dumps(second)) == pytest.approx(expected, rel=0.03)
    assert ceilings.frame_bytes(1024) == pytest.approx(expected, rel=0.04)


def test_quick_parts_have_figures(shaped: ModuleType):
    scale, ceilings = importlib.import_module("scale"), importlib.import_module("scale_ceilings")
    figures = {
        "new": ceilings.measure_routes(10, 20, 2)["new"],
        "places": ceilings.measure_places(4, 3, 2),
        "journal": ceilings.measure_journal(16, 8, 32, 2).steps_per_s,
    }
    shown = scale.as_json({"quick": figures})["quick"]
    assert all(each["mean"] > 0 and each["n"] == 2 for each in shown.values())


@pytest.fixture
def simulation(shaped: ModuleType) -> ModuleType:
    return importlib.import_module("scale_simulation")


def test_a_virtual_hour_takes_no_time_and_keeps_its_order(shaped: ModuleType):
    clock = importlib.import_module("scale_clock")

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

    assert clock.run(main) == [("a", 1800), ("b", 2000), ("b", 2000.5), ("a", 3600)]

    async def nobody(loop: asyncio.AbstractEventLoop) -> None:
        await loop.create_future()

    with pytest.raises(RuntimeError, match="nothing is due"):
        clock.run(nobody)


COSTS = {"call": 0.001, "episode": 0.002, "beat": 0.0, "step": 0.0001, "start": 0.0, "latency": 0.01}


def test_five_simulated_nodes_do_what_can_be_reckoned(shaped: ModuleType, simulation: ModuleType):
    work = shaped.Work(calls=4, tokens=1024, seconds=2.0, spread=0.0)
    setting = simulation.Setting(5, 2, work, rounds=4.0)
    outcome = simulation.simulate(setting, simulation.Costs(**COSTS))
    # An episode: there and back, four answers each with its commit, and two more commits.
    commit, episodes = 2 * 0.01 + 0.001, 10 * 4
    assert outcome.waits[0] == pytest.approx(commit, abs=0.01)
    assert outcome.seconds == pytest.approx(4 * (4 * (2.0 + commit) + 3 * 2 * 0.01), rel=0.02)
    per_call = 0.001 + 0.002 / 4
    assert outcome.head == pytest.approx(outcome.calls_per_s * per_call, rel=0.25)
    assert (outcome.played_again, outcome.calls_again) == (0, 0)
    # Each runner is looked at four times a second.
    assert outcome.beats == pytest.approx(5 * 4 * outcome.seconds, rel=0.05)
    again = simulation.simulate(setting, simulation.Costs(**COSTS))
    assert (again.seconds, again.waits, again.head) == (outcome.seconds, outcome.waits, outcome.head)
    assert episodes == setting.rounds * setting.at_once


def test_a_head_with_too_much_to_do_sets_the_pace(shaped: ModuleType, simulation: ModuleType):
    work = shaped.Work(calls=4, tokens=1024, seconds=0.1)
    costs = simulation.Costs(**COSTS | {"call": 0.01})
    outcome = simulation.simulate(simulation.Setting(5, 10, work, rounds=8.0), costs)
    assert outcome.head == pytest.approx(1.0, abs=0.05)
    assert outcome.calls_per_s == pytest.approx(1 / (0.01 + 0.002 / 4), rel=0.05)
    assert outcome.waits[0] > 10 * 0.02


def test_lost_nodes_cost_time_and_no_call_is_committed_twice(shaped: ModuleType, simulation: ModuleType):
    work = shaped.Work(calls=4, tokens=1024, seconds=20.0)
    setting = simulation.Setting(5, 4, work, rounds=2.0, lost_per_minute=0.4)
    outcome = simulation.simulate(setting, simulation.Costs(**COSTS | {"start": 2.0}))
    assert outcome.played_again >= 4 and outcome.calls_again == 0
    # Two rounds of four calls, of which some are made again.
    assert outcome.seconds > 2 * 4 * 20.0
