"""`etude check`, `train` and `resume` with training at a language-model server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.lm_stand_in import LmStandIn
from tests.backends.openai_stand_in import BASE, KEY
from tests.cli.projects import change, etude, scripted_project, submitted


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LmStandIn]:
    stand_in = LmStandIn(say=lambda model, number: "yes" if model != BASE or number % 3 else "no")
    with stand_in.serve() as url:
        monkeypatch.setenv("SERVER", url)
        monkeypatch.setenv("SERVER_KEY", KEY)
        monkeypatch.setattr("etude.backends.lm_client._POLL", 0.0)
        yield stand_in


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: LmStandIn) -> Path:
    """The current folder, with a config that samples and trains at the server."""
    monkeypatch.chdir(tmp_path)
    config = scripted_project(tmp_path)
    policy = {"_type": "openai", "model_name": BASE, "base_url": "${SERVER}", "api_key": "${SERVER_KEY}"}
    change(
        config,
        llms={"policy": {**policy, "provider": "etude", "retry_wait": 0}},
        trainer_adapters={"server": {"_type": "lm_server"}},
        trainers={"epochs": {"_type": "epochs", "poll_interval": 0.001}},
    )
    return config


def test_grpo_goes_through_the_server_and_back(served, server):
    shown = etude("train", "config.yml", "--name", "r", "-o", "finetuning.num_epochs=1")
    assert shown.exit_code == 0, shown.stderr
    (job,) = server.jobs.values()
    assert job["method"]["type"] == "grpo"
    groups = [row["trajectories"] for row in server.rows("ftjob-0")]
    assert {len(group) for group in groups} == {4}
    assert {tuple(one["turns"][0]["token_ids"]) for group in groups for one in group} == {
        (*b"yes", 2),
        (*b"no", 2),
    }
    summary = json.loads(Path("runs/r/summary.json").read_text())
    assert summary["last_version"]["location"] == job["fine_tuned_model"]
    assert server.sampled[-1] == job["fine_tuned_model"], "validation is by what was trained"
    assert server.engine == []
    samples = submitted("runs/r")
    assert sorted({sample.reward for sample in samples}) == [0.0, 1.0]
    assert all(sample.source.makes_advantages for sample in samples)
    for sample in samples:
        answer = [at for at, weight in enumerate(sample.weights) if weight]
        assert answer and {sample.weights[at] for at in answer} == {1.0}
        assert all((sample.advantages[at] > 0) == (sample.reward == 1) for at in answer)


def test_a_run_that_was_stopped_while_its_job_trains_goes_on_with_it(served, server):
    change(served, trainer_adapters__server__free_engine=True, finetuning__num_epochs=1)
    server.faults["GET /fine_tuning/jobs/ID"] = [401]
    assert etude("train", "config.yml", "--name", "r").exit_code == 1
    assert server.status["status"] == "stopped"
    shown = etude("resume", "r")
    assert shown.exit_code == 0, shown.stderr
    assert len(server.jobs) == 1
    assert server.status["status"] == "running"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"provider": "auto"}, "does not ask its endpoint for them.*'provider: etude'"),
        ({"logprobs": False}, "does not ask for logprobs; set 'logprobs: true'"),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_grpo_without_tokens_is_refused_before_the_first_call(served, server, settings, message, command):
    for name, value in settings.items():
        change(served, **{f"llms__policy__{name}": value})
    shown = etude(command, "config.yml")
    assert shown.exit_code == 2
    assert re.search(message, shown.stdout + shown.stderr)
    assert server.requests == []
