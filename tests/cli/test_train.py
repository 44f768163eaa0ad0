"""`etude init` and `etude train`: from nothing to a trained run, and the alarms that ring meanwhile."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from etude.cli.first_steps import Project
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from tests.cli.projects import change, etude, events, fail, rows, started_anew, succeed
from tests.support import one_quick, read_summary


@pytest.mark.slow
def test_a_config_becomes_a_trained_run(local):
    result = started_anew("train", "config.yml", "--name", "first", folder=local)
    assert result.returncode == 0, result.stderr
    run = local / "runs" / "first"
    assert read_summary(run)["epochs_trained"] == 2
    assert (run / "reward_plot.png").stat().st_size > 1000
    assert "reward before" in result.stdout
    assert "runs/first/reward_plot.png" in result.stdout
    assert result.stdout.rstrip().splitlines()[-1].startswith("next: etude export runs/first")


def test_datasets_can_be_named_on_the_command_line(project):
    (project / "other.jsonl").write_text(rows(3, "o"))
    (project / "held out.jsonl").write_text(rows(2, "h"))
    options = ["--dataset", "other.jsonl", "--validation-dataset", "held out.jsonl"]
    shown = succeed("train", "config.yml", "--name", "r", *options, "--validation-interval", "1", "--json")
    started = events(shown.stdout)[0]
    assert (started["examples"], started["validation_examples"]) == (3, 2)
    validations = json.loads((project / "runs" / "r" / "validation_history.json").read_text())
    assert [entry["epoch"] for entry in validations] == [0, 1, 2]


def test_an_evaluation_is_stored_where_the_command_line_says(project):
    succeed("evaluate", "config.yml", "--name", "e", "--output-dir", "other")
    assert [run.name for run in (project / "other").iterdir()] == ["e"]


def test_debug_shows_how_it_came_to_an_error(project):
    shown = fail("check", "missing.yml", "--debug")
    assert "Traceback" in shown.stderr
    assert "Traceback" not in etude("check", "missing.yml").stderr


def test_what_nobody_foresaw_is_one_sentence(project, monkeypatch):
    monkeypatch.setattr("etude.config.load.load_config", lambda *args: {}["surprise"])
    shown = fail("train", "config.yml", code=1)
    assert re.fullmatch(r"error: \S+test_train\.py:\d+: KeyError: 'surprise'; .*--debug.*\n", shown.stderr)


def test_a_project_that_runs_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoken = "Which number is larger, 12 or 345? Answer with the number only. 67890"
    build_policy(build_tokenizer([spoken], splits=["[0-9]"]), 0).export(tmp_path / "base")
    shown = succeed("init", "my_agent", "--model", "base")
    assert shown.stdout.rstrip().splitlines()[-1] == "next: cd my_agent && etude check config.yml"
    monkeypatch.chdir(tmp_path / "my_agent")
    assert etude("check", "config.yml").exit_code == 0
    for name, count in (("train", 512), ("validation", 256)):
        lines = Path(f"{name}.jsonl").read_text().splitlines()
        assert len(lines) == count
        Path(f"{name}.jsonl").write_text("\n".join(lines[:4]))
    few = ["-o", "finetuning.num_epochs=1", "-o", "trajectory_builders.grpo.drop_flat_groups=false"]
    told = events(etude("train", "config.yml", *few, "--json").stdout)
    assert (told[0]["examples"], told[0]["validation_examples"]) == (4, 4)
    assert told[-1]["event"] in ("finished", "error")
    assert any(event["event"] == "validated" for event in told)


@pytest.mark.parametrize("task", one_quick(*get_args(Project)))
def test_each_task_passes_a_check_and_holds_out_rows_of_its_own(task, tmp_path, monkeypatch):
    told = json.loads(etude("init", tmp_path / task, "--task", task, "--json").stdout)
    assert {"agent.py", "train.jsonl", "validation.jsonl", "config.yml"} <= {*told["files"]}
    monkeypatch.chdir(tmp_path / task)
    texts = [path.read_text() for path in Path().iterdir()]
    build_policy(build_tokenizer(texts), 0, TinyShape(max_context=2048)).export(Path("tiny"))
    succeed("check", "config.yml", "-o", "llms.policy.model=tiny")
    train, held_out = (
        [{key: value for key, value in row.items() if key != "id"} for row in events(Path(name).read_text())]
        for name in ("train.jsonl", "validation.jsonl")
    )
    assert len(train) >= 256 and len(held_out) >= 128
    assert not any(row in train for row in held_out)


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "agent.py").write_text("mine")
    assert etude("init", tmp_path).exit_code == 2
    assert (tmp_path / "agent.py").read_text() == "mine"
    assert not (tmp_path / "config.yml").exists()


def test_a_run_that_an_alarm_stopped_goes_on_with_the_alarm_off(project):
    alarm = {"_type": "tests.loop.test_alarm_actions:AtEpochs", "at": [1], "action": "stop"}
    change(project / "config.yml", finetuning__alarms={"mine": alarm})
    shown = succeed("train", "config.yml", "--name", "r")
    assert "warning: epoch 1: this epoch" in shown.stdout
    assert read_summary(project / "runs/r")["epochs_trained"] == 1
    assert etude("resume", "runs/r", "-o", "finetuning.alarms.mine.action=off").exit_code == 0
    assert read_summary(project / "runs/r")["epochs_trained"] == 2
