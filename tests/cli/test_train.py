"""`etude train`: from a config to a trained run."""

from __future__ import annotations

import json
import re

import pytest

from tests.cli.projects import change, etude, events, rows, started_anew


def test_a_config_becomes_a_trained_run(local):
    result = started_anew("train", "config.yml", "--name", "first", folder=local)
    assert result.returncode == 0, result.stderr
    run = local / "runs" / "first"
    assert json.loads((run / "summary.json").read_text())["epochs_trained"] == 2
    assert (run / "reward_plot.png").stat().st_size > 1000
    assert "reward before" in result.stdout
    assert "runs/first/reward_plot.png" in result.stdout
    assert result.stdout.rstrip().splitlines()[-1].startswith("next: etude export runs/first")


def test_datasets_can_be_named_on_the_command_line(project):
    (project / "other.jsonl").write_text(rows(3, "o"))
    (project / "held out.jsonl").write_text(rows(2, "h"))
    options = ["--dataset", "other.jsonl", "--validation-dataset", "held out.jsonl"]
    shown = etude("train", "config.yml", "--name", "r", *options, "--validation-interval", "1", "--json")
    assert shown.exit_code == 0, shown.stderr
    started = events(shown.stdout)[0]
    assert (started["examples"], started["validation_examples"]) == (3, 2)
    validations = json.loads((project / "runs" / "r" / "validation_history.json").read_text())
    assert [entry["epoch"] for entry in validations] == [0, 1, 2]


def test_a_wrong_request_leaves_no_run_behind(project):
    change(project / "config.yml", trainer_adapters__counting__methods=["dpo"])
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 2
    assert "grpo" in shown.stderr
    assert not (project / "runs" / "r").exists()
    change(project / "config.yml", trainer_adapters__counting__methods=["grpo"])
    assert etude("train", "config.yml", "--name", "r").exit_code == 0


def test_a_run_is_not_written_over(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 2
    assert "etude resume" in shown.stderr
    assert (project / "runs" / "r" / "summary.json").exists()


@pytest.mark.parametrize("command", ["train", "check", "evaluate"])
def test_debug_may_stand_anywhere(project, command):
    shown = etude(command, "missing.yml", "--debug")
    assert shown.exit_code == 2
    assert "Traceback" in shown.stderr
    assert "Traceback" not in etude(command, "missing.yml").stderr


def test_what_nobody_foresaw_is_one_sentence(project, monkeypatch):
    monkeypatch.setattr("etude.config.load.load_config", lambda *args: {}["surprise"])
    shown = etude("train", "config.yml")
    assert shown.exit_code == 1
    assert re.fullmatch(
        r"error: \S+test_train\.py:\d+: KeyError: 'surprise'; add --debug to see how it came to that\n",
        shown.stderr,
    )
