"""`etude resume`: going on with what was stopped, or for longer."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from etude.core.errors import StoreError
from etude.loop.record import Record
from tests.cli.projects import change, etude, local_project, rows


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


def test_a_finished_run_can_be_trained_for_longer(project):
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    shown = etude("resume", "r", "-o", "finetuning.num_epochs", "4")
    assert shown.exit_code == 0, shown.stderr
    run = project / "runs" / "r"
    assert json.loads((run / "summary.json").read_text())["epochs_trained"] == 4
    assert yaml.safe_load((run / "config.yml").read_text())["finetuning"]["num_epochs"] == 4


@pytest.mark.parametrize(
    "override",
    [
        "finetuning.seed=3",
        "llms.policy.model=other",
        "trajectory_builders.grpo.num_generations=2",
        "finetuning.run_configuration.validation_interval=1",
    ],
)
def test_what_a_run_rests_on_stays_as_it_was(stopped, override):
    shown = etude("resume", "stopped", "-o", override)
    assert shown.exit_code == 2
    assert override.partition("=")[0] in shown.stderr
    assert "can be changed: " in shown.stderr and "finetuning.error_budget" in shown.stderr


@pytest.mark.parametrize(
    "override",
    [
        "finetuning.error_budget=1",
        "eval.general.timeout=20",
        "eval.general.max_calls=7",
        "workflow.timeout=9",
        "eval.evaluators.correct.timeout=9",
        "trainers.epochs.job_timeout=30",
        "trainers.epochs.keep_checkpoints=all",
    ],
)
def test_how_a_run_goes_on_can_be_changed_and_is_remembered(stopped, override):
    mend(stopped)
    key, _, value = override.partition("=")
    shown = etude("resume", "stopped", "-o", override)
    assert shown.exit_code == 0, shown.stderr
    assert f"{key}: " in shown.stdout
    kept = yaml.safe_load((stopped / "runs/stopped/config.yml").read_text())
    for part in key.split("."):
        kept = kept[part]
    assert str(kept) in (value, f"{value}.0")


@pytest.fixture
def stopped_with_secrets(stopped):
    """The same, of a config with secrets that are written out: one that is declared, and one in a mapping."""
    helper = {"_type": "openai", "model_name": "m", "extra_body": {"api_key": "canary-in-the-file"}}
    change(stopped / "config.yml", llms__policy__api_key="sk-in-the-file", finetuning__target_model="policy")
    change(stopped / "config.yml", llms__helper={**helper, "base_url": "http://localhost:1/v1"})
    assert etude("train", "config.yml", "--name", "secret").exit_code == 1
    mend(stopped)
    return stopped


def test_secrets_are_given_again(stopped_with_secrets):
    change(stopped_with_secrets / "config.yml", llms={"policy": {"_type": "tests.cli.parts:scripted"}})
    shown = etude("resume", "secret")
    assert shown.exit_code == 2
    assert "-o llms.policy.api_key=" in shown.stderr
    again = ("-o", "llms.policy.api_key=sk-new", "-o", "llms.helper.extra_body.api_key=canary-new")
    assert etude("resume", "secret", *again).exit_code == 0
    kept = (stopped_with_secrets / "runs/secret/config.yml").read_text()
    assert "sk-new" not in kept and "canary" not in kept


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


def test_weights_that_were_made_and_not_recorded_are_kept_and_taken(local, monkeypatch):
    """Stopped between the adoption of the second epoch's weights and its record: nothing is trained anew."""
    added = Record.add_epoch

    async def stops(record, epoch, *args, **kwargs):
        if epoch == 1:
            raise StoreError("the disk is full")
        return await added(record, epoch, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Record, "add_epoch", stops)
        assert etude("train", "config.yml", "--name", "r").exit_code == 1
    made = (local / "runs/r/checkpoints/v2/job.json").stat().st_mtime_ns
    assert etude("resume", "r").exit_code == 0
    assert (local / "runs/r/checkpoints/v2/job.json").stat().st_mtime_ns == made
    epochs = json.loads(etude("runs", "show", "r", "--json").stdout)["history"]["epochs"]
    assert [epoch["version"]["number"] for epoch in epochs] == [1, 2]


def test_a_run_does_not_go_on_from_another_base_model(tmp_path, base, monkeypatch):
    folder = tmp_path / "project"
    local_project(folder, shutil.copytree(base, tmp_path / "base"))
    change(folder / "config.yml", trainer_adapters__local__lora={"r": 2}, finetuning__num_epochs=1)
    monkeypatch.chdir(folder)
    shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 0, shown.stderr
    weights = tmp_path / "base" / "model.safetensors"
    others = bytearray(weights.read_bytes())
    others[-1] ^= 1
    weights.write_bytes(others)
    for arguments in (("resume", "r", "-o", "finetuning.num_epochs", "2"), ("export", "r")):
        shown = etude(*arguments)
        assert shown.exit_code == 2
        assert "is not what this run began from: model.safetensors is changed" in " ".join(
            shown.stderr.split()
        )
