"""`etude runs` and `etude jobs`: what there is, of several models too, and figures with what they measure."""

import asyncio
import json

import pytest

from etude.loop.alarms import RewardCollapse, alarm_events
from etude.store.journal import ModelLog
from etude.store.run_folder import RunFolder
from tests.cli.projects import change, etude, fail, rows, succeed, train_two_models
from tests.support import read_summary


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


def test_runs_side_by_side(project):
    assert etude("train", "config.yml", "--name", "short").exit_code == 0
    more = ["-o", "finetuning.num_epochs=1", "-o", "finetuning.seed=5"]
    assert etude("train", "config.yml", "--name", "other", *more).exit_code == 0
    told = json.loads(etude("runs", "compare", "short", "other", "--json").stdout)
    assert told["settings"]["finetuning.num_epochs"] == [2, 1]
    assert told["settings"]["finetuning.seed"] == [0, 5]
    assert "finetuning.output_dir" not in told["settings"]
    (differences,) = told["differences"]
    assert set(differences) == {"correct", "brief"}
    difference = differences["correct"]
    assert difference["n"] == 6
    assert difference["low"] <= difference["mean"] <= difference["high"]
    shown = etude("runs", "compare", "short", "other").stdout
    assert "other against short, correct: " in shown and "finetuning.seed" in shown


@pytest.fixture
def two(local, base):
    """A run of two tiny models, both trained."""
    train_two_models(local, base)
    (local / "train.jsonl").write_text(rows(2, "t"))
    change(local / "config.yml", finetuning__num_epochs=1)
    succeed("train", "config.yml", "--name", "r")
    return local


def test_each_model_is_shown(two):
    shown = etude("runs", "show", "r").stdout
    assert "target          left" in shown and "target          second" in shown
    told = json.loads(etude("runs", "show", "r", "--json").stdout)
    assert set(told["histories"]) == {"left", "second"}
    assert "left 0." in etude("runs", "list").stdout
    jobs = json.loads(etude("jobs", "r", "--json").stdout)
    assert {job["target"] for job in jobs} == {"left", "second"}


@pytest.mark.slow
def test_each_model_is_exported_and_evaluated_by_its_name(two):
    shown = fail("export", "r")
    assert "left:best, second:best, after --version or 'r:'" in shown.stderr
    for version in ("left", "second:v1"):
        succeed("export", "r", "--version", version, "--out", f"out-{version[:4]}", "--json")
    card = (two / "out-seco" / "README.md").read_text()
    assert "# r, second, version 1" in card
    assert "before training (v0)" in card
    shown = succeed("evaluate", "config.yml", "--model", "r:second:v1", "--json")
    assert json.loads(shown.stdout)["model"] == "r:second:v1"


UNVALIDATED = ("-o", "finetuning.run_configuration.validation_dataset=null")


def train(*options):
    return succeed("train", "config.yml", "--name", "r", *options).stdout


def lines_with(text, word):
    return [line for line in text.splitlines() if line.startswith(word)]


def test_a_run_of_one_epoch_without_validation_has_no_after_and_export_says_which_version_it_takes(local):
    shown = train(*UNVALIDATED, "-o", "finetuning.num_epochs=1")
    (reward,) = lines_with(shown, "reward")
    assert "n=16" in reward and "episodes of epoch 1, sampled from v0" in reward
    (missing,) = lines_with(shown, "not measured")
    assert "last update of v1" in missing
    assert "finetuning.run_configuration.validation_dataset" in missing
    for text in (shown, etude("runs", "show", "r").stdout):
        assert "best version" not in text and "reward after" not in text
    summary = read_summary(local / "runs" / "r")
    assert summary["after"] is summary["best_version"] is None
    shown = succeed("export", "r", "--out", "mine")
    assert "r:v1  (the last version;" in shown.stdout
    assert "not measured" in (local / "mine" / "README.md").read_text()
    assert etude("export", "r", "--version", "best", "--out", "other").exit_code == 2


async def make_collapse(run):
    """Let the run's validations say that training has made the model worse."""
    with RunFolder.open(run) as folder:
        log, earlier = ModelLog(folder.journal), []
        ends = {0: (0.412, 0.37, 0.455), 1: (0.0, 0.0, 0.01)}
        for entry in log.state.history.validations:
            reward, low, high = ends[entry.epoch]
            figures = {"avg_reward": reward, "reward_low": low, "reward_high": high}
            entry = entry.model_copy(update={"metrics": {**entry.metrics, **figures}})
            events = alarm_events({"reward_collapse": RewardCollapse()}, entry, earlier)
            earlier.append(entry.model_copy(update={"alarms": events}))
            await log.add(earlier[-1])


def test_after_a_collapse_the_base_model_is_exported(local):
    train("-o", "finetuning.num_epochs=1")
    asyncio.run(make_collapse(local / "runs" / "r"))
    shown = etude("runs", "show", "r").stdout
    assert "v1 is worse than" in shown and "best version    v0, the base model" in shown
    assert "r:base  (the version with" in succeed("export", "r", "--out", "mine").stdout


def test_when_every_episode_fails_the_cause_is_said(project):
    (project / "train.jsonl").write_text(rows(4, "broken"))
    change(project / "config.yml", finetuning__error_budget=1.0, finetuning__num_epochs=1)
    failed = fail("train", "config.yml", "--name", "r", *UNVALIDATED, code=1)
    assert "16 × call_failed" in failed.stderr and "the endpoint answered 500 five times" in failed.stderr
    (warning,) = [line for line in failed.stdout.splitlines() if "warning: epoch 1" in line]
    assert "16 episodes failed (call_failed): " in warning
    command = f"etude episodes show train/1/broken0/0 --run {project / 'runs' / 'r'}"
    assert warning.endswith(command)
    shown = etude("runs", "show", "r").stdout
    assert "16 × call_failed" in shown and "the endpoint answered 500 five times" in shown
    assert "etude episodes show train/1/broken0/0 --run runs/r" in shown
    assert "failure: 'call_failed" in succeed(*command.split()[1:]).stdout
