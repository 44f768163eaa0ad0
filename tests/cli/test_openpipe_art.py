"""Whole runs on an ART server: `etude check`, `train`, `resume` and `jobs`, over real sockets."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.backends.art_stand_in import KEY, StandIn, running
from tests.cli.projects import change, etude, process, rows, succeed
from tests.support import read_summary


@pytest.fixture
def server() -> Any:
    with running(StandIn()) as found:
        yield found


@pytest.fixture
def art(project: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a config that trains on the server."""
    monkeypatch.setenv("ART_API_KEY", KEY)
    policy = {"_type": "openai", "model_name": "agent", "base_url": f"{server.url}/v1", "provider": "vllm"}
    backend = {"base_url": server.url, "name": "agent", "api_key": "${ART_API_KEY}"}
    training = {"learning_rate": 1e-4, "beta": 0.1}
    change(
        project / "config.yml",
        llms={"policy": policy},
        trainer_adapters={"art": {"_type": "openpipe_art", "backend": backend, "training": training}},
        finetuning__run_configuration__validation_interval=1,
    )
    return project


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"trajectory_builders": {"b": {"_type": "dpo"}}}, "openpipe_art' can do: grpo"),
        ({"trajectory_builders": {"b": {"_type": "grpo", "credit": "turn"}}}, "has 'credit: turn'"),
        ({"llms__policy__provider": "other"}, "set 'provider: vllm'"),
        ({"llms__policy__logprobs": False}, "llms.policy does not ask"),
        ({"llms__policy__base_url": None}, "has no 'base_url'"),
        ({"llms": {"policy": {"_type": "tests.cli.parts:open_scripted"}}}, "is `_type: scripted`"),
        ({"finetuning__fine_tune_from_scratch": True}, "openpipe_art' always continues"),
        ({"trainer_adapters__art__training__learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"trainer_adapters__art__backend": {"name": "a"}}, "give either `base_url`"),
    ],
)
def test_what_art_cannot_do_is_refused_before_anything_is_sampled(
    art: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], told: str
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    change(art / "config.yml", **keys)
    shown = etude("check", "config.yml")
    assert shown.exit_code != 0
    assert told in " ".join((shown.stdout + shown.stderr).split())
    assert server.requests == []


def test_a_run_trains_on_the_server_and_samples_what_it_trained(art: Path, server: StandIn):
    for name, prefix in (("train", "t"), ("validation", "v")):
        (art / f"{name}.jsonl").write_text(rows(3, prefix))
    succeed("train", "config.yml", "--name", "r", "--json")
    run = art / "runs" / "r"
    assert (read_summary(run)["epochs_trained"], len(server.jobs)) == (2, 2)
    assert [json.loads(line)["model_version"] for line in (run / "training_metrics.jsonl").open()] == [1, 2]
    validations = json.loads((run / "validation_history.json").read_text())
    assert validations[-1]["avg_reward"] > validations[0]["avg_reward"]
    # 3 examples × 4 generations for each epoch; 3 held-out examples before, between and after.
    assert server.sampled == {"agent@0": 12 + 3, "agent@1": 12 + 3, "agent@2": 3}
    assert all(job["config"]["learning_rate"] == 1e-4 for job in server.jobs)
    told = [json.loads(line) for line in (run / "openpipe_art_jobs.jsonl").open()]
    assert [line["run_id"] for line in told if "status" in line] == ["r-epoch-1", "r-epoch-2"]
    losses = [line["loss"] for line in told if "loss" in line]
    assert losses and all(loss > 0 for loss in losses)
    assert KEY not in "".join(path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_run_that_was_killed_while_the_server_trained_goes_on(art: Path, server: StandIn):
    server.pause = 600
    running_process = process("train", "config.yml", "--name", "r", "--json", folder=art)
    assert server.begun.wait(60)
    running_process.kill()
    running_process.communicate()
    server.steps["agent"] += 1
    server.pause = 0
    succeed("resume", "runs/r", "--json")
    # The first job was done on the server, and is not made again.
    assert (len(server.jobs), server.steps["agent"]) == (2, 2)
    assert server.sampled["agent@0"] < 2 * 32
    shown = json.loads(etude("jobs", "runs/r", "--json").stdout)
    assert [job["status"] for job in shown] == ["completed", "completed"]
