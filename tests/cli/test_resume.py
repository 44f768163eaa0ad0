"""`etude resume`: going on with what was stopped, or for longer."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.cli.projects import change, etude, rows


@pytest.fixture
def stopped(project):
    """A run that failed in its first epoch, after its validation."""
    broken = [{"id": f"b{n}", "question": f"b{n} broken?", "answer": "yes"} for n in range(2)]
    lines = "".join(json.dumps(row) + "\n" for row in broken)
    (project / "train.jsonl").write_text(rows(6, "t") + lines)
    change(project / "config.yml", llms__policy__log=str(project / "log"), finetuning__error_budget=0.1)
    assert etude("train", "config.yml", "--name", "stopped").exit_code == 1
    return project


def mend(project):
    (project / "train.jsonl").write_text((project / "train.jsonl").read_text().replace(" broken", ""))


def test_the_latest_unfinished_run_is_taken(stopped):
    assert etude("train", "config.yml", "--name", "other", "--dataset", "validation.jsonl").exit_code == 0
    mend(stopped)
    shown = etude("resume")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith("going on with stopped")
    assert json.loads((stopped / "runs/stopped/summary.json").read_text())["epochs_trained"] == 2


def test_nothing_is_sampled_twice(stopped):
    sampled = (stopped / "log").read_text().splitlines()
    mend(stopped)
    assert etude("resume", "stopped").exit_code == 0
    everything = (stopped / "log").read_text().splitlines()
    assert everything[: len(sampled)] == sampled
    assert len(set(everything)) == len(everything)


def test_when_all_runs_are_finished_it_says_so(project):
    assert etude("train", "config.yml").exit_code == 0
    shown = etude("resume")
    assert shown.exit_code == 2
    assert "no unfinished run" in shown.stderr


def test_a_finished_run_can_be_trained_for_longer(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    shown = etude("resume", "r", "-o", "finetuning.num_epochs", "4")
    assert shown.exit_code == 0, shown.stderr
    run = project / "runs" / "r"
    assert json.loads((run / "summary.json").read_text())["epochs_trained"] == 4
    assert yaml.safe_load((run / "config.yml").read_text())["finetuning"]["num_epochs"] == 4


def test_a_run_that_was_to_be_longer_is_unfinished_until_it_is(project, monkeypatch):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    monkeypatch.setattr("tests.training.FakeAdapter.submit", lambda *args: 1 / 0)
    assert etude("resume", "r", "-o", "finetuning.num_epochs=4").exit_code == 1
    monkeypatch.undo()
    monkeypatch.chdir(project)
    assert "going on with r" in etude("resume").stdout


def test_a_run_cannot_be_made_shorter_than_it_is(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    shown = etude("resume", "r", "-o", "finetuning.num_epochs=1")
    assert shown.exit_code == 2
    assert "has done 2 epochs already" in shown.stderr


@pytest.mark.parametrize(
    "override", ["finetuning.seed=3", "llms.policy.model=other", "eval.general.timeout=1"]
)
def test_a_run_goes_on_as_it_was_begun(stopped, override):
    shown = etude("resume", "stopped", "-o", override)
    assert shown.exit_code == 2
    assert override.partition("=")[0] in shown.stderr


def test_secrets_are_given_again(stopped):
    mend(stopped)
    change(stopped / "runs/stopped/config.yml", llms__policy__api_key="**********")
    shown = etude("resume", "stopped")
    assert shown.exit_code == 2
    assert "-o llms.policy.api_key=" in shown.stderr
    assert etude("resume", "stopped", "-o", "llms.policy.api_key=sk-new").exit_code == 0
    assert "sk-new" not in (stopped / "runs/stopped/config.yml").read_text()


def test_an_evaluation_is_resumed_as_one(project):
    broken = rows(4, "v") + json.dumps({"id": "b", "question": "broken", "answer": "yes"}) + "\n"
    (project / "validation.jsonl").write_text(broken)
    change(project / "config.yml", finetuning__error_budget=0.0)
    assert etude("evaluate", "config.yml", "--name", "e", "--repeat", "3").exit_code == 1
    (project / "validation.jsonl").write_text(broken.replace("broken", "fine?"))
    shown = etude("resume")
    assert shown.exit_code == 0, shown.stderr
    result = json.loads((project / "runs/e/evaluation.json").read_text())
    assert (result["repeat"], result["episodes"]) == (3, 15)


def test_a_run_folder_may_have_been_moved(local):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    (local / "runs").rename(local / "archive")
    shown = etude("resume", "archive/r", "-o", "finetuning.num_epochs=3")
    assert shown.exit_code == 0, shown.stderr


def test_an_unknown_run_is_named_with_the_nearest(project):
    assert etude("train", "config.yml", "--name", "calculator").exit_code == 0
    shown = etude("resume", "calculater")
    assert shown.exit_code == 2
    assert "did you mean 'calculator'?" in shown.stderr
