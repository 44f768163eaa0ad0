"""Figures that say what they were measured on: at the end of `train`, in `runs`, `evaluate` and `export`."""

from __future__ import annotations

import asyncio
import json

import pytest

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


def test_without_validation_the_last_figure_is_of_the_version_that_it_was_sampled_from(project):
    shown = trained(*UNVALIDATED, "-o", "finetuning.num_epochs=3")
    _, last = lines_with(shown, "reward")
    assert "training episodes of epoch 3, sampled from v2" in last
    assert "last version    v3" in shown
    listed = etude("runs", "list").stdout
    assert "in epoch 1" in listed and "in epoch 3" in listed


def test_with_validation_before_and_after_are_of_the_same_examples(project):
    shown = trained()
    before, after = lines_with(shown, "reward")
    assert before.startswith("reward before") and "validation examples, before training (v0)" in before
    assert after.startswith("reward after") and "validation examples, after epoch 2 (v2)" in after
    assert "not measured" not in shown and "best version    v2" in shown


def test_best_is_an_error_where_nothing_was_measured_after_training(project):
    trained(*UNVALIDATED)
    shown = etude("evaluate", "config.yml", "--model", "r:best")
    assert shown.exit_code == 2
    assert "r:last is the last one, v2" in shown.stderr and "validation_dataset" in shown.stderr
    shown = etude("evaluate", "config.yml", "--model", "r", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["model"] == "r:v2"
    assert "model r:v2: the last version; none was measured after it was trained" in shown.stderr


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


def test_every_evaluator_is_in_the_files_and_in_what_is_shown(project):
    shown = trained()
    run = project / "runs" / "r"
    lines = [json.loads(line) for line in (run / "training_metrics.jsonl").read_text().splitlines()]
    histories = [json.loads((run / f"{name}_history.json").read_text()) for name in ("reward", "validation")]
    for entry in [*lines, *histories[0], *histories[1]]:
        assert set(entry["evaluators"]) == {"correct", "brief"}
        for score in entry["evaluators"].values():
            assert 0 <= score["low"] < score["mean"] < score["high"] <= 1
        assert entry["evaluators"]["correct"]["mean"] == pytest.approx(entry["avg_reward"])
        assert entry["evaluators"]["brief"]["n"] == entry["num_scored"]
    assert lines_with(shown, "brief")
    assert "brief" in etude("runs", "show", "r").stdout
    trained("-o", "finetuning.seed=3", name="s")
    compared = etude("runs", "compare", "r", "s").stdout
    assert "brief before" in compared and "brief after" in compared
    assert "s against r, brief:" in compared


def test_an_evaluated_version_is_shown_and_compared(project):
    trained()
    for name, options in (("x", ["--model", "r:best"]), ("y", ["--greedy"])):
        assert etude("evaluate", "config.yml", "--name", name, *options).exit_code == 0
    assert "model           r:v2" in etude("runs", "show", "x").stdout
    other = etude("runs", "show", "y").stdout
    assert "model           scripted" in other
    assert "backend" not in other, "an evaluation has none"
    assert json.loads(etude("runs", "show", "x", "--json").stdout)["model"] == "r:v2"
    settings = json.loads(etude("runs", "compare", "x", "y", "--json").stdout)["settings"]
    assert settings == {"evaluate.model": ["r:v2", "scripted"], "evaluate.greedy": [False, True]}
    assert "evaluate.model" in etude("runs", "compare", "x", "y").stdout


def test_n_counts_scores_and_not_episodes(project):
    (project / "train.jsonl").write_text(rows(4, "t") + rows(4, "broken"))
    shown = trained(*UNVALIDATED, "-o", "finetuning.error_budget=1.0")
    assert all("n=16" in line for line in lines_with(shown, "reward"))
    assert "16 failed" in shown


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


def test_failed_scores_are_counted_with_their_cause(project):
    agent = project / "agent.py"
    fussy = "\n\n@etude.evaluator\ndef fussy(example, output):\n    return {'yes': 1.0}[output]\n"
    agent.write_text(agent.read_text() + fussy)
    change(project / "config.yml", eval__evaluators__fussy="agent:fussy", finetuning__error_budget=1.0)
    shown = trained(*UNVALIDATED)
    assert "scores of 'fussy' failed" in shown and "KeyError: 'no'" in shown
    assert "score:fussy" in etude("runs", "show", "r").stdout
    evaluated = etude("evaluate", "config.yml", "--name", "e", "--repeat", "4").stdout
    assert "score:fussy" in evaluated and "etude episodes show eval/" in evaluated
    assert "score:fussy" in etude("runs", "show", "e").stdout


def test_cut_off_answers_are_warned_about(local):
    # Whether there is anything to train on, with answers of one token, is another matter.
    settings = ("-o", "llms.policy.max_tokens=1", "-o", "finetuning.num_epochs=1")
    shown = etude("train", "config.yml", "--name", "r", *settings).stdout
    assert "answers (100 %) were cut off at the limit of tokens" in shown
    listed = etude("runs", "show", "r").stdout
    assert "were cut off at the limit of tokens" in listed and "100 %" in listed
    dropped = etude(
        "train", "config.yml", "--name", "d", *settings, "-o", "trajectory_builders.grpo.cut_off=drop"
    )
    assert "16 × episode with an answer that was cut off" in " ".join(dropped.stdout.split())


def test_one_episode_is_printed_by_its_id(project):
    assert etude("evaluate", "config.yml", "--name", "e").exit_code == 0
    assert "episode: eval/v0/0" in etude("episodes", "show", "eval/v0/0", "--run", "e").stdout
    missing = etude("episodes", "show", "eval/nobody/0", "--run", "e")
    assert missing.exit_code == 2
    assert "no episode 'eval/nobody/0'" in missing.stderr
