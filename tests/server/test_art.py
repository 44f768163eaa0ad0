"""The protocol of ART's `ServerlessBackend` on a real server, spoken plainly."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from etude.integrations.art.serving import TrainingOptions
from tests.server.art_client import ASK, choice, gathered, group, pair, trajectory
from tests.server.process import ServerProcess
from tests.server.test_crash import find_worker

MODELS, JOBS = "/v1/preview/models", "/v1/preview/training-jobs"
RATE = 0.05


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Each test trains a model of its own on it."""
    with ServerProcess(model, tmp_path_factory.mktemp("art")) as running:
        yield running


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.http(timeout=120) as client:
        yield client


def created(http: httpx.Client, name: str) -> dict[str, Any]:
    body = {"entity": None, "project": "p", "name": name, "base_model": "tiny", "return_existing": True}
    answer = http.post(MODELS, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def job_body(model: str, *groups: Any, **options: Any) -> dict[str, Any]:
    """The body that the client sends: options that nobody chose are null, false or 0."""
    config = {"advantage_balance": 0.0, "epsilon": None, "kimi_k2_tau": None, "learning_rate": RATE}
    config |= {"ppo": False, "importance_sampling_level": "token", "scale_rewards": True}
    config |= {"mask_prob_ratio": False} | options
    return {"model_id": model, "trajectory_groups": list(groups), "experimental_config": config}


def begun(http: httpx.Client, model: str, *groups: Any, **options: Any) -> str:
    answer = http.post(JOBS, json=job_body(model, *groups, **options))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def list_events(http: httpx.Client, job: str, after: str | None = None) -> list[dict[str, Any]]:
    answer = http.get(f"{JOBS}/{job}/events", params={} if after is None else {"after": after})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


def ended(http: httpx.Client, job: str) -> list[dict[str, Any]]:
    for _ in range(1200):
        events = list_events(http, job)
        if events and events[-1]["type"] in ("training_ended", "training_failed"):
            return events
        time.sleep(0.1)
    raise AssertionError("the job never ended")


def list_steps(http: httpx.Client, name: str, **query: Any) -> list[int]:
    return [one["step"] for one in http.get(f"{MODELS}/{name}/checkpoints", params=query).json()["data"]]


def names(http: httpx.Client, name: str) -> list[str]:
    listed = [one["id"] for one in http.get("/v1/models").json()["data"]]
    return sorted(one for one in listed if one.partition("@")[0] == name)


def list_jobs(http: httpx.Client, name: str) -> list[str]:
    query = {"metadata[art_model]": name}
    return [one["id"] for one in http.get("/v1/fine_tuning/jobs", params=query).json()["data"]]


@pytest.mark.slow
def test_steps_are_trained_and_each_answers_under_its_names(
    server: ServerProcess, http: httpx.Client
) -> None:
    model = created(http, "agent")
    assert created(http, "agent") == model
    assert (model["id"], model["entity"], model["run_id"]) == ("agent", "etude", None)
    name = "wandb-artifact:///etude/p/agent"
    for step in range(2):
        assert list_steps(http, "agent", limit=1) == [step]
        groups = gathered(server.client(), name, groups=1, seed=10 * step)
        job = begun(http, "agent", *groups)
        events = ended(http, job)
        assert [event["type"] for event in events] == ["training_started", "gradient_step", "training_ended"]
        assert events[0]["data"] == {"num_sequences": 1}
        # The tokens and logprobs that were sampled are those that are trained on.
        assert events[1]["data"]["learning_rate"] == RATE and abs(events[1]["data"]["sampled_kl"]) < 1e-6
        assert list_events(http, job, after=events[1]["id"]) == events[2:]
    assert list_steps(http, "agent", order="asc") == [0, 1, 2]
    assert names(http, "agent") == ["agent", "agent@0", "agent@1", "agent@2"]
    ask: Any = {"messages": ASK, "seed": 1, "max_tokens": 4}
    asked = (name, f"{name}:step2", "agent@2", f"{name}:step0")
    found = [server.client().chat.completions.create(model=one, **ask) for one in asked]
    said = [[round(token.logprob, 4) for token in one.choices[0].logprobs.content] for one in found]
    assert said[0] == said[1] == said[2] != said[3]
    gone = http.request("DELETE", f"{MODELS}/agent/checkpoints", json={"steps": [0, 1, 7]}).json()
    assert gone == {"deleted_count": 2, "not_found_steps": [7]}
    assert list_steps(http, "agent") == [2]
    listed = [one["id"] for one in http.get("/v1/models").json()["data"] if one["id"].startswith("ft:")]
    assert sum("ckpt" not in one for one in listed) == 1


@pytest.mark.slow
def test_a_killed_server_and_worker_lose_no_training_and_double_none(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path) as server:
        with server.http(timeout=120) as http:
            created(http, "agent")
            job = begun(http, "agent", pair())
            worker = find_worker(server, job)
            server.kill()
            os.kill(worker, signal.SIGKILL)
        server.start()
        with server.http(timeout=120) as http:
            # The same request again follows the training that the first one began.
            if list_steps(http, "agent") == [0]:
                assert begun(http, "agent", pair()) == job
            assert ended(http, job)[-1]["type"] == "training_ended"
            assert list_steps(http, "agent") == [1, 0] and list_jobs(http, "agent") == [job]


@pytest.mark.slow
def test_a_model_that_is_being_trained_takes_no_other_data(http: httpx.Client) -> None:
    created(http, "busy")
    job = begun(http, "busy", pair())
    other = http.post(JOBS, json=job_body("busy", pair(0.0, 1.0)))
    assert f"'busy' is being trained by job {job}" in refused(other, 409)
    assert ended(http, job)[-1]["type"] == "training_ended"


@pytest.mark.slow
def test_a_training_that_fails_says_why_and_is_no_step(http: httpx.Client) -> None:
    created(http, "failing")
    job = begun(http, "failing", pair())
    # Its data are gone before its worker has read them.
    file = http.get(f"/v1/fine_tuning/jobs/{job}").json()["training_file"]
    http.delete(f"/v1/files/{file}").raise_for_status()
    last = ended(http, job)[-1]
    assert last["type"] == "training_failed" and file in last["data"]["error_message"]
    assert list_steps(http, "failing") == [0]


def test_a_step_without_anything_to_learn_ends_at_once(server: ServerProcess, http: httpx.Client) -> None:
    created(http, "idle")
    job = begun(http, "idle", pair(1.0, 1.0))
    assert [(event["type"], event["data"]) for event in list_events(http, job)] == [
        ("training_started", {"num_sequences": 0}),
        ("training_ended", {}),
    ]
    assert list_steps(http, "idle") == [1, 0]
    ask = {"messages": ASK, "seed": 5, "max_tokens": 8}
    first, second = (
        server.client().chat.completions.create(model=name, **ask).choices[0].message  # type: ignore[call-overload]
        for name in ("idle@0", "idle@1")
    )
    assert first == second
    assert "idle@1: nothing to learn from" in server.log.read_text()


def test_tokens_are_told_by_their_ids_unless_a_client_wants_their_texts(
    server: ServerProcess, http: httpx.Client
) -> None:
    created(http, "teller")
    ask = {"messages": ASK, "max_tokens": 2}
    client = server.client()
    told = client.chat.completions.create(model="teller", **ask).choices[0]  # type: ignore[call-overload]
    assert all(token.token.startswith("token_id:") for token in told.logprobs.content)
    silent = client.chat.completions.create(model="teller", logprobs=False, **ask)  # type: ignore[call-overload]
    assert silent.choices[0].logprobs is None
    plain = client.chat.completions.create(model="tiny", **ask)  # type: ignore[call-overload]
    assert plain.choices[0].logprobs is None


def test_a_model_is_deleted(http: httpx.Client) -> None:
    created(http, "short")
    assert http.delete(f"{MODELS}/short").status_code == 200
    assert http.get(f"{MODELS}/short/checkpoints").status_code == 404
    assert names(http, "short") == []


def test_what_cannot_be_registered_is_refused_by_name(http: httpx.Client) -> None:
    created(http, "taken")
    body = {"project": "p", "name": "taken", "base_model": "tiny", "return_existing": True}
    assert "in project 'p'" in refused(http.post(MODELS, json=body | {"project": "other"}), 409)
    assert "already" in refused(http.post(MODELS, json=body | {"return_existing": False}), 409)
    assert "Qwen" in refused(http.post(MODELS, json=body | {"base_model": "Qwen/Qwen2.5-7B"}), 404)
    assert "name of another model" in refused(http.post(MODELS, json=body | {"name": "tiny"}), 409)
    for name in ("", "a@1", "../x", "ft:x"):
        refused(http.post(MODELS, json=body | {"name": name}), 400)


def test_what_is_wrong_is_refused_by_name(http: httpx.Client) -> None:
    created(http, "strict")
    wrong = refused(http.post(JOBS, json=job_body("strict", pair(), mask_prob_ratio=True)), 400)
    assert "experimental_config.mask_prob_ratio" in wrong
    assert "register it first" in refused(http.post(JOBS, json=job_body("nobody", pair())), 404)
    newest = http.request("DELETE", f"{MODELS}/strict/checkpoints", json={"steps": [0]})
    assert "step 0 is the newest" in newest.json()["error"]["message"]
    assert http.get(f"{JOBS}/ftjob-none/events").status_code == 404


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([{"content": "no role"}, choice(("token_id:5", -1.0))], "must be a dict with a role"),
        ([*ASK, choice(("token_id:4000", -1.0))], "token_id:4000 is not in the vocabulary"),
        ([*ASK, choice(("two words", -1.0))], "'two words' is named by its text"),
        ([*ASK, choice(*[("token_id:5", -1.0)] * 200)], "the context ends at 128"),
        ([*ASK, choice(("token_id:5", -1.0), message="said")], "message"),
    ],
)
def test_a_wrong_trajectory_is_refused_with_its_place(
    http: httpx.Client, wrong: list[dict[str, object]], told: str
) -> None:
    created(http, "wrong")
    bad = trajectory(0.0) | {"messages_and_choices": wrong}
    sent = job_body("wrong", pair(), group(trajectory(1.0, choice(("token_id:5", -1.0))), bad))
    found = refused(http.post(JOBS, json=sent), 400)
    assert found.startswith("trajectory_groups[1].trajectories[1].messages_and_choices[1]: ")
    assert told in found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        ({"learning_rate": 1e-4}, {"learning_rate": 1e-4}),
        ({"epsilon": 0.3}, {"clip_low": 0.3, "clip_high": 0.3}),
        ({"epsilon": 0.3, "epsilon_high": 0.5}, {"clip_low": 0.3, "clip_high": 0.5}),
        ({"epsilon_high": 0.5}, {"clip_high": 0.5}),
        ({"ppo": True}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"ppo": False}, {"surrogate": "cispo", "clip_high": 4.0}),
        ({"ppo": False, "epsilon": 1.0, "epsilon_high": 2}, {"surrogate": "cispo", "clip_high": 2.0}),
        ({"importance_sampling_level": "sequence"}, {"ratio": "sequence"}),
        ({"scale_rewards": False}, {"advantage_scale": "none"}),
        ({"mask_prob_ratio": False, "kimi_k2_tau": None, "advantage_balance": 0.0}, {}),
    ],
)
def test_options_of_a_request(given: dict[str, Any], found: dict[str, Any]) -> None:
    usual = {"learning_rate": 5e-6, "reference": "base", "aggregation": "sequence", "ratio": "token"}
    asked = TrainingOptions.model_validate(given).hyperparameters()
    assert asked.model_dump(exclude_none=True) == usual | found


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"advantage_balance": 0.5}, "advantage_balance"),
        ({"ppo": False, "epsilon": 0.5}, "epsilon"),
        ({"epsilon": 1.5}, "epsilon"),
        ({"ppoo": True}, "ppoo"),
        ({"importance_sampling_level": "average"}, "importance_sampling_level"),
        ({"learning_rate": -1}, "learning_rate"),
    ],
)
def test_an_option_that_is_not_there_is_refused(given: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        TrainingOptions.model_validate(given)
