"""Estimates of what a run would cost, against what it then has cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.budget.bill import Line
from etude.preflight.estimate import PerEpisode
from tests.budget.endpoint import ChargingEndpoint
from tests.budget.project import bill_in, charged_project
from tests.cli.projects import etude

ONE_EPOCH = {
    "enabled": True,
    "target_model": "policy",
    "reward_function": {"name": "correct"},
    "num_epochs": 1,
}


def project(folder: Path, url: str, **changes: Any) -> Path:
    """A run of 40 episodes, in one epoch, on a backend that trains by counting."""
    return charged_project(
        folder,
        url,
        examples=10,
        trajectory_builders={"grpo": {"_type": "grpo", "num_generations": 4}},
        trainer_adapters={"counting": {"_type": "tests.cli.parts:counting"}},
        finetuning={**ONE_EPOCH, "trajectory_builder": "grpo", "trainer_adapter": "counting"},
        **changes,
    )


def checked(*arguments: Any) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(etude("check", "config.yml", "--json", *arguments).stdout)
    return report


def test_a_few_episodes_that_are_played_say_what_a_run_costs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ChargingEndpoint() as endpoint:
        project(tmp_path, endpoint.url)
        estimate = checked("--play", 20)["estimate"]
        assert (estimate["measured_on"], endpoint.calls) == (20, 40)
        assert not (tmp_path / "runs").exists()
        assert etude("evaluate", "config.yml", "--name", "x", "--repeat", 4).exit_code == 0
    usd, whole = estimate["usd"], bill_in(tmp_path / "runs/x")["total"]
    assert estimate["training_episodes"] == 40 and estimate["calls"] == whole["calls"] == 80
    assert usd["mean"] == pytest.approx(whole["usd"], rel=0.2)
    assert usd["low"] < whole["usd"] < usd["high"]
    assert estimate["usd_by_model"].keys() == {"policy", "judge"}
    assert sum(estimate["usd_by_model"].values()) == pytest.approx(usd["mean"])


def test_a_run_that_would_reach_its_limit_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ChargingEndpoint() as endpoint:
        project(tmp_path, endpoint.url, budget={"usd": 0.1})
        shown = etude("check", "config.yml", "--play", 8).stdout
    assert "! budget.usd is 0.1, and the whole run would take about 0.1" in shown
    assert "price           about $0.1" in shown


def test_an_interval_is_that_of_the_episodes_that_were_measured():
    line = Line("policy", "agent", "", calls=5, prompt_tokens=400, completion_tokens=100)
    each = PerEpisode(5, lines=(line,), spread=0.5)
    assert (each.calls, each.tokens) == (1, 100)
    found = each.of(each.tokens, 20)
    # t(4) · 0.5 · √(1/5 + 1/20)
    assert found.mean == 2000 and found.high == pytest.approx(2000 * (1 + 2.776 * 0.25), rel=1e-3)
    assert found.low == pytest.approx(2000 * (1 - 2.776 * 0.25), rel=1e-3)
    assert not PerEpisode(1, lines=(line,)).of(100, 20).is_known
