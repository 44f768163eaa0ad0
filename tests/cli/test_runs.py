"""`etude runs` and `etude jobs`: what there is, and what came of it."""

from __future__ import annotations

import json

from tests.cli.projects import etude, rows


def test_runs_are_listed_with_what_came_of_them(project):
    assert etude("train", "config.yml", "--name", "good").exit_code == 0
    (project / "train.jsonl").write_text(rows(3, "broken"))
    assert etude("train", "config.yml", "--name", "bad").exit_code == 1
    by_name = {run["name"]: run for run in json.loads(etude("runs", "list", "--json").stdout)}
    assert by_name["good"]["state"] == "finished"
    assert by_name["good"]["summary"]["epochs_trained"] == 2
    assert by_name["bad"]["state"] == "unfinished"
    shown = etude("runs", "list").stdout
    assert "good" in shown and "2/2" in shown and "0/2" in shown


def test_a_run_that_cannot_be_read_does_not_hide_the_others(project):
    assert etude("train", "config.yml", "--name", "good").exit_code == 0
    broken = project / "runs" / "broken"
    broken.mkdir()
    (broken / "run.db").write_bytes(b"this is no database, but it is long enough" * 40)
    shown = etude("runs", "list")
    assert shown.exit_code == 0
    assert "unreadable" in shown.stdout and "good" in shown.stdout
    assert etude("runs", "show", "broken").exit_code == 1


def test_a_run_is_shown_with_its_epochs(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    shown = etude("runs", "show", "r")
    assert shown.exit_code == 0
    for text in (
        "finished",
        "grpo",
        "counting",
        "v2",
        "validation",
        "next: etude evaluate runs/r/config.yml",
    ):
        assert text in shown.stdout
    told = json.loads(etude("runs", "show", "runs/r", "--json").stdout)
    assert [entry["epoch"] for entry in told["history"]["epochs"]] == [1, 2]


def test_runs_side_by_side(project):
    assert etude("train", "config.yml", "--name", "short").exit_code == 0
    more = ["-o", "finetuning.num_epochs=3", "-o", "finetuning.seed=5"]
    assert etude("train", "config.yml", "--name", "long", *more).exit_code == 0
    told = json.loads(etude("runs", "compare", "short", "long", "--json").stdout)
    assert told["settings"]["finetuning.num_epochs"] == [2, 3]
    assert told["settings"]["finetuning.seed"] == [0, 5]
    assert "finetuning.output_dir" not in told["settings"]
    (difference,) = told["differences"]
    assert difference["n"] == 6
    assert difference["low"] <= difference["mean"] <= difference["high"]
    shown = etude("runs", "compare", "short", "long").stdout
    assert "long against short" in shown and "finetuning.seed" in shown


def test_a_job_that_nobody_follows_is_interrupted(project, monkeypatch):
    monkeypatch.setattr("tests.training.FakeAdapter.wait_until_complete", lambda *args, **kwargs: 1 / 0)
    assert etude("train", "config.yml", "--name", "r").exit_code == 1
    (job,) = json.loads(etude("jobs", "r", "--json").stdout)
    assert job["status"] == "interrupted"
    assert "next: etude resume runs/r" in etude("jobs", "r").stdout
