"""Figures that say what they were measured on: at the end of `train`, in `runs`, `evaluate` and `export`."""

from __future__ import annotations

import asyncio
import json

from etude.alarms.alarm import events_of
from etude.alarms.built_in import RewardCollapse
from etude.store.log import EpochLog
from etude.store.run_folder import RunFolder
from tests.cli.projects import change, etude, rows

UNVALIDATED = ("-o", "finetuning.run_configuration.validation_dataset=null")


def trained(*options, name="r"):
    shown = etude("train", "config.yml", "--name", name, *options)
    assert shown.exit_code == 0, shown.stderr
    return shown.stdout


def summary(project, name="r"):
    return json.loads((project / "runs" / name / "summary.json").read_text())


def lines_with(text, word):
    return [line for line in text.splitlines() if line.startswith(word)]


def test_a_run_of_one_epoch_without_validation_has_no_after(project):
    shown = trained(*UNVALIDATED, "-o", "finetuning.num_epochs=1")
    (reward,) = lines_with(shown, "reward")
    assert "n=32" in reward and "training episodes of epoch 1, sampled from v0" in reward
    (missing,) = lines_with(shown, "not measured")
    assert "nothing was measured after the last update of v1" in missing
    assert "finetuning.run_configuration.validation_dataset" in missing
    for text in (shown, etude("runs", "show", "r").stdout):
        assert "best version" not in text and "reward after" not in text
    assert summary(project)["after"] is summary(project)["best_version"] is None


def test_with_validation_before_and_after_are_of_the_same_examples(project):
    shown = trained()
    before, after = lines_with(shown, "reward")
    assert before.startswith("reward before") and "validation examples, before training (v0)" in before
    assert after.startswith("reward after") and "validation examples, after epoch 2 (v2)" in after
    assert "not measured" not in shown and "best version    v2" in shown


def test_export_says_which_version_it_takes_and_why(local):
    trained(*UNVALIDATED, "-o", "finetuning.num_epochs=1")
    shown = etude("export", "r", "--out", "mine")
    assert shown.exit_code == 0, shown.stderr
    assert "r:v1  (the last version; none was measured after it was trained)" in shown.stdout
    assert "This version was not measured." in (local / "mine" / "README.md").read_text()
    assert etude("export", "r", "--version", "best", "--out", "other").exit_code == 2


async def make_collapse(run):
    """Let the run's validations say that training has made the model worse."""
    with RunFolder.open(run) as folder:
        log, earlier = EpochLog(folder.journal), []
        ends = {0: (0.412, 0.37, 0.455), 1: (0.0, 0.0, 0.01)}
        for entry in log.history(run.name).validations:
            reward, low, high = ends[entry.epoch]
            figures = {"avg_reward": reward, "reward_low": low, "reward_high": high}
            entry = entry.model_copy(update={"metrics": {**entry.metrics, **figures}})
            events = events_of({"reward_collapse": RewardCollapse()}, entry, earlier)
            earlier.append(entry.model_copy(update={"alarms": events}))
            await log.add_validation(earlier[-1])


def test_after_a_collapse_everybody_says_so(local):
    trained("-o", "finetuning.num_epochs=1")
    asyncio.run(make_collapse(local / "runs" / "r"))
    sentence = "v1 is worse than the model that training began with"
    shown = etude("runs", "show", "r").stdout
    assert sentence in shown
    assert "best version    v0, the base model: no trained version has done better" in shown
    exported = etude("export", "r", "--out", "mine")
    assert exported.exit_code == 0, exported.stderr
    assert sentence in exported.stdout
    assert "r:base  (the version with the best validation, which is the base model" in exported.stdout
    assert sentence in json.loads(etude("export", "r", "--out", "too", "--json").stdout)["warning"]
    assert sentence in (local / "mine" / "README.md").read_text()


def test_when_every_episode_fails_the_cause_is_said(project):
    (project / "train.jsonl").write_text(rows(4, "broken"))
    change(project / "config.yml", finetuning__error_budget=1.0, finetuning__num_epochs=1)
    failed = etude("train", "config.yml", "--name", "r", *UNVALIDATED)
    assert failed.exit_code == 1
    assert "16 × call_failed" in failed.stderr and "the endpoint answered 500 five times" in failed.stderr
    (warning,) = [line for line in failed.stdout.splitlines() if "warning: epoch 1" in line]
    assert "16 episodes failed (call_failed): " in warning
    command = f"etude episodes show train/1/broken0/0 --run {project / 'runs' / 'r'}"
    assert warning.endswith(command)
    shown = etude("runs", "show", "r").stdout
    assert "16 × call_failed" in shown and "the endpoint answered 500 five times" in shown
    assert "etude episodes show train/1/broken0/0 --run runs/r" in shown
    one = etude(*command.split()[1:])
    assert one.exit_code == 0
    assert "failure: 'call_failed" in one.stdout
