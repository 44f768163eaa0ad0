"""`etude check`, `train` and `resume` with training at OpenAI or a language-model server, by stand-ins."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.lm_stand_in import LmStandIn
from tests.backends.openai_stand_in import BASE, KEY, StandIn
from tests.cli.projects import change, etude, fail, process, succeed
from tests.support import one_quick, read_summary


def says(model: str, number: int) -> str:
    """The base model is right half of the time, and what was fine-tuned always."""
    return "yes" if model != BASE or number % 2 else "no"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn(say=says)
    with stand_in.serve() as url:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        yield stand_in


@pytest.fixture
def openai_config(project: Path, api: StandIn) -> Path:
    """A config that samples and trains at the stand-in."""
    config = project / "config.yml"
    prices = {"prompt": 0.15, "completion": 0.6, "training": 3.0}
    change(
        config,
        llms={"policy": {"_type": "openai", "model_name": BASE, "max_tokens": 8, "prices": prices}},
        trajectory_builders={"good": {"_type": "expert_iteration", "num_generations": 4, "min_reward": 1}},
        trainer_adapters={"openai": {"_type": "openai", "hyperparameters": {"n_epochs": 2}}},
        trainers={"epochs": {"_type": "epochs", "poll_interval": 0.001}},
    )
    return config


def test_a_run_makes_jobs_and_samples_from_the_models_that_they_make(openai_config, api):
    shown = succeed("train", "config.yml", "--name", "r")
    first, second = api.jobs.values()
    assert (first["model"], second["model"]) == (BASE, "ft:gpt-4o-mini-2024-07-18:org::ftjob-0")
    assert [job["metadata"]["etude_version"] for job in (first, second)] == ["1", "2"]
    assert [row["messages"][-1]["content"] for row in api.rows("ftjob-0")] == 16 * ["yes"]
    models = [BASE, first["fine_tuned_model"], second["fine_tuned_model"]]
    assert [*map(api.sampled.count, models)] == [6 + 32, 32, 6], (
        "validation, an epoch, another one, and validation again"
    )
    summary = read_summary(Path("runs/r"))
    assert (summary["before"]["avg_reward"], summary["after"]["avg_reward"]) == (0.5, 1.0)
    assert summary["last_version"]["location"] == second["fine_tuned_model"]
    assert f"last version    v2  {second['fine_tuned_model']}" in shown.stdout
    jobs = json.loads(etude("jobs", "r", "--json").stdout)
    assert [job["metrics"]["train_loss"] for job in jobs] == [0.5, 0.5]


@pytest.mark.slow
def test_a_failed_job_is_made_again_under_another_name(openai_config, api):
    api.ending = "failed"
    shown = fail("train", "config.yml", "--name", "r", code=1)
    assert "Code: invalid_training_file" in shown.stderr
    api.ending = "succeeded"
    assert etude("resume", "r").exit_code == 0
    names = [job["metadata"]["etude_job"] for job in api.jobs.values()]
    assert names == ["r-epoch-1", "r-epoch-1-retry-1", "r-epoch-2"]


def test_a_check_asks_nobody(openai_config, api):
    succeed("check", "config.yml")
    assert api.requests == []


@pytest.mark.parametrize(
    "moment", one_quick("POST /fine_tuning/jobs", "POST /files", "GET /fine_tuning/jobs/ID")
)
def test_a_run_that_is_killed_pays_once(openai_config, api, moment):
    """Killed by SIGKILL after the API did what was asked, and before the answer came."""
    change(openai_config, finetuning__num_epochs=1, finetuning__run_configuration={})
    train = process("train", "config.yml", "--name", "r", folder=openai_config.parent)
    api.faults[moment] = [train.kill]
    train.communicate(timeout=120)
    assert train.returncode == -signal.SIGKILL
    sampled = len(api.sampled)
    succeed("resume", "r")
    assert (len(api.files), len(api.jobs), len(api.sampled)) == (1, 1, sampled)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LmStandIn]:
    stand_in = LmStandIn(say=lambda model, number: "yes" if model != BASE or number % 3 else "no")
    with stand_in.serve() as url:
        monkeypatch.setenv("SERVER", url)
        monkeypatch.setenv("SERVER_KEY", KEY)
        monkeypatch.setattr("etude.backends.lm_server._POLL", 0.0)
        yield stand_in


@pytest.fixture
def server_config(project: Path, server: LmStandIn) -> Path:
    """A config that samples and trains at the server."""
    config = project / "config.yml"
    policy = {"_type": "openai", "model_name": BASE, "base_url": "${SERVER}", "api_key": "${SERVER_KEY}"}
    change(
        config,
        llms={"policy": {**policy, "provider": "etude"}},
        trainer_adapters={"server": {"_type": "lm_server"}},
        trainers={"epochs": {"_type": "epochs", "poll_interval": 0.001}},
    )
    return config


def test_grpo_goes_through_the_server_and_back(server_config, server):
    succeed("train", "config.yml", "--name", "r", "-o", "finetuning.num_epochs=1")
    (job,) = server.jobs.values()
    assert job["method"]["type"] == "grpo"
    groups = [row["trajectories"] for row in server.rows("ftjob-0")]
    assert {len(group) for group in groups} == {4}
    sampled = {tuple(one["turns"][0]["token_ids"]) for group in groups for one in group}
    assert sampled == {(*b"yes", 2), (*b"no", 2)}
    assert read_summary(Path("runs/r"))["last_version"]["location"] == job["fine_tuned_model"]
    assert server.sampled[-1] == job["fine_tuned_model"], "validation is by what was trained"
    assert server.engine == []


def test_a_run_that_was_stopped_while_its_job_trains_goes_on_with_it(server_config, server):
    change(server_config, trainer_adapters__server__free_engine=True, finetuning__num_epochs=1)
    server.faults["GET /fine_tuning/jobs/ID"] = [401]
    assert etude("train", "config.yml", "--name", "r").exit_code == 1
    assert server.status["status"] == "stopped"
    succeed("resume", "r")
    assert len(server.jobs) == 1
    assert server.status["status"] == "running"


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        (
            "openai_config",
            {"trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 4}}},
            "adapter 'openai' .*: dpo, supervised",
        ),
        (
            "openai_config",
            {"llms": {"policy": {"_type": "tests.cli.parts:open_scripted"}}},
            "trains models of `_type: openai`, and llms.policy is `_type: scripted`",
        ),
        ("server_config", {"llms__policy__provider": "auto"}, "ask its endpoint .*'provider: etude'"),
        ("server_config", {"llms__policy__logprobs": False}, "needs logprobs .* 'logprobs: true' in"),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_what_cannot_be_done_is_refused_before_any_call(request, project, where, changes, message, command):
    change(request.getfixturevalue(where), **changes)
    shown = fail(command, "config.yml")
    assert re.search(message, shown.stdout + shown.stderr)
    assert request.getfixturevalue("api" if where == "openai_config" else "server").requests == []
    assert not [*project.glob("runs/*")]
