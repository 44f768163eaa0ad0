"""The benchmarks measure what they say; how long things take is not tested."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from etude.core.trajectory import TrajectoryCollection

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("harness")


def test_both_models_give_complete_trajectories(harness: ModuleType):
    stub = importlib.import_module("stub")
    with stub.running_server() as base_url:
        for transport in ("inprocess", "http"):
            # `collect` raises when a trajectory or a call is missing.
            cost = asyncio.run(harness.collect(harness.Setting(transport, 2, 4), 16, base_url))
            assert cost.cpu_ms > 0 and cost.per_second > 0


def test_work_that_was_not_done_is_not_measured(harness: ModuleType):
    with pytest.raises(SystemExit, match="0 trajectories of 16 episodes"):
        nothing = TrajectoryCollection(run_id="epoch-0")
        harness.require_complete(nothing, harness.Setting("inprocess", 1, 4), 16)


def test_json_has_the_keys_that_others_read(harness: ModuleType):
    costs = {setting: harness.Cost(cpu_ms=1.5, per_second=100.0) for setting in harness.SETTINGS}
    found = harness.as_json(harness.Memory(60.0, 62.0, 65.0, 20_000), costs)
    cpu = {"calls1": 1.5, "calls5": 1.5}
    assert found["cpu_ms_per_trajectory"] == {"inprocess": cpu, "http": cpu}
    assert (found["trajectories_per_s"], found["peak_rss_mb"]) == (100.0, 65.0)
    assert found["rss_growth_mb_per_1000_episodes"] == 0.1
    assert len(found["settings"]) == 8
