"""`etude init`: a project that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from etude.cli.init import Task
from etude.models.source import packaged_folder
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from etude.preflight import starter_files
from etude.preflight.starter import MODEL
from etude.preflight.starter_files.larger.rows import HELD_OUT, TRAIN
from tests.cli.projects import etude, events


def test_a_project_that_runs_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoken = "Which number is larger, 12 or 345? Answer with the number only. 67890"
    build_policy(build_tokenizer([spoken], splits=["[0-9]"]), 0).export(tmp_path / "base")
    shown = etude("init", "my_agent", "--model", "base")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.rstrip().splitlines()[-1] == "next: cd my_agent && etude check config.yml"
    monkeypatch.chdir(tmp_path / "my_agent")
    assert etude("check", "config.yml").exit_code == 0
    few = ["-o", "finetuning.num_epochs=1", "-o", "trajectory_builders.grpo.drop_flat_groups=false"]
    told = events(etude("train", "config.yml", *few, "--json").stdout)
    assert (told[0]["examples"], told[0]["validation_examples"]) == (TRAIN, HELD_OUT)
    assert told[-1]["event"] in ("finished", "error")
    assert any(event["event"] == "validated" for event in told)


def test_the_default_model_is_named(tmp_path):
    shown = etude("init", tmp_path / "new")
    assert MODEL in shown.stdout
    assert MODEL in (tmp_path / "new" / "config.yml").read_text()


def test_it_says_where_the_model_comes_from(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("etude.models.source.cached_folder", lambda name: None)
    told = "downloaded from the Hugging Face hub when it is first used, 270 MB"
    assert f"{told}; choose" in etude("init", tmp_path / "one").stdout
    packaged_folder().mkdir(parents=True)
    assert "where the hub does not answer" in etude("init", tmp_path / "two").stdout
    monkeypatch.setattr("etude.models.source.cached_folder", lambda name: tmp_path / "snapshot")
    assert "here already, in" in etude("init", tmp_path / "three").stdout


def test_each_folder_of_starter_files_is_a_task():
    [folder] = map(Path, starter_files.__path__)
    assert sorted(get_args(Task)) == sorted(path.parent.name for path in folder.glob("*/rows.py"))


@pytest.mark.parametrize("task", get_args(Task))
def test_each_task_passes_a_check_and_holds_out_rows_of_its_own(task, tmp_path, monkeypatch):
    told = json.loads(etude("init", tmp_path / task, "--task", task, "--json").stdout)
    assert {"agent.py", "train.jsonl", "validation.jsonl", "config.yml"} <= {*told["files"]}
    monkeypatch.chdir(tmp_path / task)
    texts = [path.read_text() for path in Path().iterdir()]
    build_policy(build_tokenizer(texts), 0, TinyShape(max_context=2048)).export(Path("tiny"))
    checked = etude("check", "config.yml", "-o", "llms.policy.model=tiny")
    assert checked.exit_code == 0, checked.stdout + checked.stderr
    train, held_out = (
        [{key: value for key, value in row.items() if key != "id"} for row in events(Path(name).read_text())]
        for name in ("train.jsonl", "validation.jsonl")
    )
    assert len(train) >= 256 and len(held_out) >= 128
    assert not any(row in train for row in held_out)


def test_an_environment_has_tasks_of_its_own(tmp_path):
    shown = etude("init", tmp_path / "new", "--env", "gym:CartPole-v1", "--task", "tickets")
    assert shown.exit_code == 2 and "--env TYPE:TASK" in shown.stderr


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "agent.py").write_text("mine")
    shown = etude("init", tmp_path)
    assert shown.exit_code == 2
    assert (tmp_path / "agent.py").read_text() == "mine"
    assert not (tmp_path / "config.yml").exists()
