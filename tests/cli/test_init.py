"""`etude init`: a project that runs."""

from __future__ import annotations

import json

from etude.models.tiny import build_policy, build_tokenizer
from etude.preflight.starter import HELD_OUT, MODEL, TRAIN
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


def test_no_question_is_in_both_files(tmp_path):
    told = json.loads(etude("init", tmp_path / "new", "--json").stdout)
    assert told["files"] == ["agent.py", "train.jsonl", "validation.jsonl", "config.yml"]
    questions = [
        {row["question"] for row in events((tmp_path / "new" / name).read_text())}
        for name in ("train.jsonl", "validation.jsonl")
    ]
    assert [len(found) for found in questions] == [TRAIN, HELD_OUT]
    assert not questions[0] & questions[1]


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "agent.py").write_text("mine")
    shown = etude("init", tmp_path)
    assert shown.exit_code == 2
    assert (tmp_path / "agent.py").read_text() == "mine"
    assert not (tmp_path / "config.yml").exists()
