"""The benchmark of the cluster runs, and what it says can be read; how long things take is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cluster.py"


def benchmark(*arguments: str) -> dict[str, Any]:
    """The JSON that the benchmark prints; when it fails, the end of its errors is shown."""
    pytest.importorskip("ray")
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    figures: dict[str, Any] = json.loads(ended.stdout)
    return figures


def test_calls_of_runners_are_counted_as_they_are_committed():
    figures = benchmark("--only", "journal")
    assert figures["journal_calls_per_s"] > 0
    assert figures["journal_calls_per_s"] == figures["parts"]["journal"]["journal_calls_per_s"]["mean"]
    assert figures["efficiency"] is None


def test_agents_that_wait_are_played_by_more_runners_in_less_time():
    figures = benchmark("--only", "efficiency")
    assert figures["efficiency"].keys() == {"2", "4"}
    rates = {count: rate["mean"] for count, rate in figures["parts"]["efficiency"]["episodes_per_s"].items()}
    assert rates["1"] < rates["2"] < rates["4"]


def test_a_run_whose_parts_are_killed_ends_as_one_that_nobody_disturbs():
    chaos = benchmark("--only", "chaos", "--kills", "3", "--seed", "1")["parts"]["chaos"]
    assert (chaos["kills"], chaos["unequal_ends"], chaos["paid_twice"]) == (3, 0, 0)
    assert (chaos["hung"], chaos["head_failures"]) == ([], [])
    assert chaos["paid_requests"] > 100
