"""`etude resume`: going on with what was stopped, killed or failed, or for longer."""

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude import load_run
from etude.core.errors import StoreError
from etude.loop.bookkeeper import Bookkeeper
from tests.cli.killed import everything, killed_after
from tests.cli.projects import change, etude, events, fail, local_project, rows, succeed
from tests.support import one_quick, read_summary
from tests.training import FakeAdapter


@pytest.fixture
def half_run(project):
    """A run that failed in its first epoch, after its validation."""
    broken = [{"id": f"b{n}", "question": f"b{n} broken?", "answer": "yes"} for n in range(2)]
    lines = "".join(json.dumps(row) + "\n" for row in broken)
    (project / "train.jsonl").write_text(rows(6, "t") + lines)
    change(project / "config.yml", llms__policy__log=str(project / "log"), finetuning__error_budget=0.1)
    assert etude("train", "config.yml", "--name", "stopped").exit_code == 1
    return project


def mend(project):
    (project / "train.jsonl").write_text((project / "train.jsonl").read_text().replace(" broken", ""))


def test_nothing_is_sampled_twice(half_run):
    sampled = (half_run / "log").read_text().splitlines()
    # A run that is over is none to go on with.
    over = ["--dataset", "validation.jsonl", "-o", "llms.policy.log=null", "-o", "finetuning.num_epochs=1"]
    assert etude("train", "config.yml", "--name", "over", *over).exit_code == 0
    mend(half_run)
    shown = succeed("resume")
    assert shown.stdout.startswith("resuming stopped")
    assert "not quite those" in shown.output  # All episodes of the mended ones had failed.
    assert read_summary(half_run / "runs/stopped")["epochs_trained"] == 2
    everything = (half_run / "log").read_text().splitlines()
    assert everything[: len(sampled)] == sampled
    assert len(set(everything)) == len(everything)


FIXED = {
    "finetuning.seed": 3,
    "llms.policy.model": "other",
    "trajectory_builders.grpo.num_generations": 2,
    "finetuning.run_configuration.validation_interval": 1,
}
CHANGEABLE = {
    "finetuning.num_epochs": 1,
    "finetuning.error_budget": 1,
    "eval.general.timeout": 20,
    "eval.general.max_calls": 7,
    "trainers.epochs.job_timeout": 30,
    "trainers.epochs.keep_checkpoints": "all",
}


def test_how_a_run_goes_on_can_be_changed_and_is_remembered_and_what_it_rests_on_stays(half_run):
    for key, value in FIXED.items():
        shown = fail("resume", "stopped", "-o", f"{key}={value}")
        assert f"begun with {key}: " in shown.stderr and "did you mean" not in shown.stderr
        assert "can be changed: " in shown.stderr and "finetuning.error_budget" in shown.stderr
    mend(half_run)
    shown = succeed("resume", "stopped", *(f"-o{key}={value}" for key, value in CHANGEABLE.items()))
    config = yaml.safe_load((half_run / "runs/stopped/config.yml").read_text())
    for key, value in CHANGEABLE.items():
        assert f"{key}: " in shown.stdout
        assert functools.reduce(dict.__getitem__, key.split("."), config) == value


@pytest.fixture
def stopped_with_secrets(half_run):
    """The same, of a config with secrets that are written out: one that is declared, and one in a mapping."""
    helper = {"_type": "openai", "model_name": "m", "extra_body": {"api_key": "canary-in-the-file"}}
    change(half_run / "config.yml", llms__policy__api_key="sk-in-the-file", finetuning__target_model="policy")
    change(half_run / "config.yml", llms__helper={**helper, "base_url": "http://localhost:1/v1"})
    assert etude("train", "config.yml", "--name", "secret").exit_code == 1
    mend(half_run)
    return half_run


def test_secrets_are_given_again(stopped_with_secrets):
    change(stopped_with_secrets / "config.yml", llms={"policy": {"_type": "tests.cli.parts:open_scripted"}})
    shown = fail("resume", "secret")
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
    succeed("resume")
    result = load_run(project / "runs/e").summary
    assert (result["repeat"], result["episodes"]) == (3, 15)


def test_weights_that_were_made_and_not_recorded_are_kept_and_taken(local, monkeypatch):
    """Stopped between the adoption of the second epoch's weights and its record: nothing is trained anew."""
    added = Bookkeeper.add

    async def stops(record, entry):
        if entry.kind == "epoch" and entry.epoch == 2:
            raise StoreError("the disk is full")
        return await added(record, entry)

    with monkeypatch.context() as patch:
        patch.setattr(Bookkeeper, "add", stops)
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
    succeed("train", "config.yml", "--name", "r")
    weights = tmp_path / "base" / "model.safetensors"
    others = bytearray(weights.read_bytes())
    others[-1] ^= 1
    weights.write_bytes(others)
    for arguments in (("resume", "r", "-o", "finetuning.num_epochs=2"), ("export", "r")):
        shown = fail(*arguments)
        assert "llms.policy: " in shown.stderr and "model.safetensors has changed" in shown.stderr


def check_kills(folder: Path, kills: int, seed: int) -> None:
    """A run that is killed so many times ends as one that was not, but that it has trained epochs again."""
    arguments = ["train", "config.yml", "--name", "run"]
    whole = succeed(*arguments, "--json")
    count, chance = len(events(whole.stdout)), random.Random(seed)
    expected, last_version = results(folder)
    shutil.rmtree(folder / "runs")
    for _ in range(kills):
        if not killed_after(chance.randint(2, count - 2), *arguments, folder=folder):
            break
        arguments = ["resume", "run"]
    succeed("resume", "run")
    kept, version = results(folder)
    assert kept == expected
    assert version == last_version


def results(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The records of a run but for recoveries, and the weights of its last version."""
    run = folder / "runs" / "run"
    return everything(run, "recoveries"), (run / "checkpoints" / "v3" / "trained.safetensors").read_bytes()


NEVER = 1e9


@pytest.mark.parametrize(
    ("ahead", "seconds", "kills"),
    one_quick((False, NEVER, 1), (False, None, 2), (True, NEVER, 2)),
    ids=["never", "now", "ahead"],
)
def test_a_run_killed_at_random_ends_as_one_that_was_not(deterministic, ahead, seconds, kills):
    change(
        deterministic / "config.yml",
        finetuning__collect_ahead=ahead,
        trainer_adapters__local__checkpoint_seconds=seconds,
    )
    check_kills(deterministic, kills, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 1, 60, NEVER])
@pytest.mark.parametrize("seed", range(2, 5))
def test_a_run_killed_many_times_ends_as_one_that_was_not(deterministic, seed, seconds):
    change(deterministic / "config.yml", trainer_adapters__local__checkpoint_seconds=seconds)
    check_kills(deterministic, kills=6, seed=seed)


AGENT = """
import asyncio, pathlib
import etude
from tests.support import pass_time

@etude.workflow(timeout=100)
async def play(example: etude.Example, episode: etude.Episode) -> str:
    with open("played", "a") as played:
        played.write(example.id + "\\n")
    if "lazy" in example.inputs["question"]:
        raise ValueError("no wish to work")
    if "slow" in example.inputs["question"]:
        pass_time(100)  # Of no other, as they are played one after the other.
        await asyncio.Event().wait()
    reply = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    return reply.text

@etude.evaluator
def correct(example: etude.Example, output: str) -> float:
    if pathlib.Path("judge is away").exists() and example.id == "t0":
        raise OSError("the judge does not answer")
    return float(output == example.expected)
"""


@pytest.fixture
def failing(project, monkeypatch):
    """A run that stopped in its second epoch, with failures of every kind in both of its epochs."""
    (project / "agent.py").write_text(AGENT)
    questions = {"t0": "0?", "t1": "1?", "t2": "2?", "away": "broken?", "lazy": "lazy?", "slow": "slow?"}
    lines = [{"id": name, "question": text, "answer": "yes"} for name, text in questions.items()]
    (project / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (project / "judge is away").touch()
    change(
        project / "config.yml",
        eval__evaluators={"correct": "agent:correct"},
        eval__general__max_concurrency=1,
        finetuning__error_budget=1.0,
        llms__policy__log=str(project / "log"),
    )
    submit = FakeAdapter.submit

    async def once(adapter, trajectories):
        if trajectories.run_id.endswith("-2"):
            raise RuntimeError("the backend is away")
        return await submit(adapter, trajectories)

    with monkeypatch.context() as patch:
        patch.setattr(FakeAdapter, "submit", once)
        shown = etude("train", "config.yml", "--name", "r")
    assert shown.exit_code == 1, shown.stdout
    (project / "judge is away").unlink()
    (project / "train.jsonl").write_text((project / "train.jsonl").read_text().replace("broken", "mended"))
    (project / "played").unlink()
    return project


def failures(project) -> dict[str, int]:
    return events((project / "runs/r/training_metrics.jsonl").read_text())[-1]["failures"]


def played_ids(project) -> list[str]:
    """The training examples that an agent was run on since the run stopped."""
    file = project / "played"
    return [name for name in file.read_text().split() if name[0] != "v"] if file.exists() else []


def test_only_what_was_not_the_agents_fault_is_tried_again(failing):
    shown = succeed("resume", "r", "--retry-failed")
    assert "to be retried: 4 × call_failed, 4 × score:correct" in shown.stdout
    # The four episodes of the one example, in the epoch that was not finished.
    assert played_ids(failing) == ["away"] * 4
    assert failures(failing) == {"raised": 4, "timeout": 4}


def test_without_it_the_failures_stay(failing):
    assert etude("resume", "r").exit_code == 0
    assert played_ids(failing) == []
    assert failures(failing) == {"call_failed": 4, "raised": 4, "timeout": 4, "score:correct": 4}
