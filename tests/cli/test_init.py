"""`etude init`: a project that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from etude.cli.start import Project
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
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


@pytest.mark.parametrize("task", get_args(Project))
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


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "agent.py").write_text("mine")
    shown = etude("init", tmp_path)
    assert shown.exit_code == 2
    assert (tmp_path / "agent.py").read_text() == "mine"
    assert not (tmp_path / "config.yml").exists()
