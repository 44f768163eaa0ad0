"""`etude runs` and `etude jobs`: what there is, and what came of it."""

from __future__ import annotations

import json
import sqlite3

from etude.store.journal import Journal
from tests.cli.projects import change, etude, rows
from tests.store.test_comparison import run_with


def test_without_runs_it_says_what_to_do(project):
    shown = etude("runs", "list")
    assert shown.exit_code == 0
    assert "there are no runs in runs" in shown.stdout
    assert "next: etude train config.yml" in shown.stdout


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


def test_showing_a_run_reads_its_epochs_once(project, monkeypatch):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    keys, scan = [], Journal.scan

    def counted(self, prefix=""):
        for key, value in scan(self, prefix):
            keys.append(key)
            yield key, value

    monkeypatch.setattr(Journal, "scan", counted)
    assert etude("runs", "show", "r").exit_code == 0
    epochs = [key for key in keys if key.startswith("trainer/epoch/")]
    assert len(epochs) == len(set(epochs)) == 2


def test_runs_side_by_side(project):
    assert etude("train", "config.yml", "--name", "short").exit_code == 0
    more = ["-o", "finetuning.num_epochs=3", "-o", "finetuning.seed=5"]
    assert etude("train", "config.yml", "--name", "long", *more).exit_code == 0
    told = json.loads(etude("runs", "compare", "short", "long", "--json").stdout)
    assert told["settings"]["finetuning.num_epochs"] == [2, 3]
    assert told["settings"]["finetuning.seed"] == [0, 5]
    assert "finetuning.output_dir" not in told["settings"]
    assert told["other_inputs"] == [0]
    (difference,) = told["differences"]
    assert difference["n"] == 6
    assert difference["low"] <= difference["mean"] <= difference["high"]
    shown = etude("runs", "compare", "short", "long").stdout
    assert "long against short" in shown and "finetuning.seed" in shown


async def test_examples_that_have_only_their_ids_in_common_are_not_compared(tmp_path):
    measured = {"eval": {name: [1.0] for name in "abc"}}
    await run_with(tmp_path, "first", measured)
    await run_with(tmp_path, "second", measured, rows={name: (f"another {name}", None) for name in "abc"})
    told = json.loads(
        etude("runs", "compare", "first", "second", "--output-dir", str(tmp_path), "--json").stdout
    )
    assert (told["differences"], told["other_inputs"]) == ([None], [3])
    shown = etude("runs", "compare", "first", "second", "--output-dir", str(tmp_path)).stdout
    assert "3 ids stand for other inputs" in " ".join(shown.split())
    assert "common examples" not in shown


async def test_one_example_in_common_is_not_called_none(tmp_path):
    await run_with(tmp_path, "first", {"eval": {"a": [1.0], "b": [1.0]}})
    await run_with(tmp_path, "second", {"eval": {"a": [1.0], "c": [1.0]}})
    shown = etude("runs", "compare", "first", "second", "--output-dir", str(tmp_path)).stdout
    assert "second: measured on fewer than two examples that first was measured on" in " ".join(shown.split())


def test_one_run_cannot_be_compared(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    assert etude("runs", "compare", "r").exit_code == 2


def test_jobs_of_a_run(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    jobs = json.loads(etude("jobs", "r", "--json").stdout)
    assert [(job["epoch"], job["status"], job["version"]) for job in jobs] == [
        (1, "completed", 1),
        (2, "completed", 2),
    ]
    shown = etude("jobs", "r")
    assert "r-epoch-2" in shown.stdout
    assert "next: " in shown.stdout


def test_a_job_that_nobody_follows_is_interrupted(project, monkeypatch):
    monkeypatch.setattr("tests.training.FakeAdapter.wait_until_complete", lambda *args, **kwargs: 1 / 0)
    assert etude("train", "config.yml", "--name", "r").exit_code == 1
    (job,) = json.loads(etude("jobs", "r", "--json").stdout)
    assert job["status"] == "interrupted"
    assert "next: etude resume runs/r" in etude("jobs", "r").stdout


def test_a_damaged_run_is_refused(local):
    change(local / "config.yml", finetuning__num_epochs=2)
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    whole = etude("runs", "check", "r")
    assert whole.exit_code == 0
    assert "its journal is whole" in whole.stdout
    with sqlite3.connect(local / "runs" / "r" / "run.db") as database:
        database.execute("UPDATE steps SET value='{}' WHERE key='trainer/epoch/00000002'")
    for command in (("resume", "r"), ("runs", "check", "r")):
        refused = etude(*command)
        assert refused.exit_code == 1
        assert "1 entry is not as written: trainer/epoch/00000002" in refused.stderr
