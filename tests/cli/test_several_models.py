"""Runs that train several models: listed, shown, exported, each model by its name."""

from __future__ import annotations

import json

import pytest

from tests.cli.projects import change, etude, train_two_models


@pytest.fixture
def two(local, base):
    """A run of two tiny models, both trained."""
    train_two_models(local, base)
    change(local / "config.yml", finetuning__num_epochs=1)
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 0, shown.stderr
    return local


def test_each_model_is_shown(two):
    shown = etude("runs", "show", "r").stdout
    assert "target          left" in shown and "target          second" in shown
    told = json.loads(etude("runs", "show", "r", "--json").stdout)
    assert set(told["histories"]) == {"left", "second"}
    assert "left 0." in etude("runs", "list").stdout
    jobs = json.loads(etude("jobs", "r", "--json").stdout)
    assert {job["target"] for job in jobs} == {"left", "second"}


def test_each_model_is_exported_by_its_name(two):
    shown = etude("export", "r")
    assert shown.exit_code == 2
    assert "left:best, second:best" in shown.stderr
    for version in ("left", "second:v1"):
        told = etude("export", "r", "--version", version, "--out", f"out-{version[:4]}", "--json")
        assert told.exit_code == 0, told.stderr
    card = (two / "out-seco" / "README.md").read_text()
    assert "# r, second, version 1" in card
    assert "before training (v0) |" in card


def test_each_model_is_evaluated_by_its_name(two):
    shown = etude("evaluate", "config.yml", "--model", "r:second:v1", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["model"] == "r:second:v1"
