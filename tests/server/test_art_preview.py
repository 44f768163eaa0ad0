"""The protocol of ART's `ServerlessBackend` on a real server, spoken plainly."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.server.art_client import ASK, choice, gathered, group, pair, trajectory
from tests.server.process import ServerProcess

MODELS, JOBS = "/v1/preview/models", "/v1/preview/training-jobs"


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Any:
    with server.http(timeout=120) as client:
        yield client


def created(http: httpx.Client, name: str) -> dict[str, Any]:
    body = {"entity": None, "project": "p", "name": name, "base_model": "tiny", "return_existing": True}
    answer = http.post(MODELS, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def job_body(model: str, *groups: Any, **options: Any) -> dict[str, Any]:
    """The body that the client sends: options that nobody chose are null."""
    config = {
        "advantage_balance": 0.0,
        "epsilon": None,
        "kimi_k2_tau": None,
        "learning_rate": 5e-3,
        "ppo": False,
    }
    config |= {"importance_sampling_level": "token", "scale_rewards": True, "mask_prob_ratio": False}
    return {"model_id": model, "trajectory_groups": list(groups), "experimental_config": config | options}


def events_of(http: httpx.Client, job: str, after: str | None = None) -> list[dict[str, Any]]:
    answer = http.get(f"{JOBS}/{job}/events", params={} if after is None else {"after": after})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


def ended(http: httpx.Client, job: str) -> list[dict[str, Any]]:
    for _ in range(1200):
        events = events_of(http, job)
        if events and events[-1]["type"] in ("training_ended", "training_failed"):
            return events
        time.sleep(0.1)
    raise AssertionError("the job never ended")


def steps_of(http: httpx.Client, name: str, **query: Any) -> list[int]:
    return [one["step"] for one in http.get(f"{MODELS}/{name}/checkpoints", params=query).json()["data"]]


@pytest.mark.slow
def test_a_job_tells_its_events_and_makes_the_next_step(server: ServerProcess, http: httpx.Client) -> None:
    model = created(http, "preview")
    assert created(http, "preview") == model
    assert (model["id"], model["entity"], model["run_id"]) == ("preview", "etude", None)
    name = "wandb-artifact:///etude/p/preview"
    groups = gathered(server.client(), name, groups=1)
    job = http.post(JOBS, json=job_body("preview", *groups)).json()["id"]
    events = ended(http, job)
    assert [event["type"] for event in events] == ["training_started", "gradient_step", "training_ended"]
    assert events[0]["data"] == {"num_sequences": 1}
    assert events[1]["data"]["learning_rate"] == 5e-3 and abs(events[1]["data"]["sampled_kl"]) < 1e-6
    assert events_of(http, job, after=events[1]["id"]) == events[2:]
    assert steps_of(http, "preview", limit=1) == [1] and steps_of(http, "preview", order="asc") == [0, 1]
    ask: Any = {"messages": ASK, "seed": 1, "max_tokens": 4}
    names = (name, f"{name}:step1", "preview@1", f"{name}:step0")
    found = [server.client().chat.completions.create(model=asked, **ask) for asked in names]
    said = [[round(token.logprob, 4) for token in one.choices[0].logprobs.content] for one in found]
    assert said[0] == said[1] == said[2] != said[3]
    other = http.post("/v1/chat/completions", json={"model": name.replace("/p/", "/q/"), "messages": ASK})
    assert other.status_code == 404
    gone = http.request("DELETE", f"{MODELS}/preview/checkpoints", json={"steps": [0, 7]}).json()
    assert gone == {"deleted_count": 1, "not_found_steps": [7]}
    assert steps_of(http, "preview") == [1]


def test_a_step_without_anything_to_learn_ends_at_once(http: httpx.Client) -> None:
    created(http, "idle")
    job = http.post(JOBS, json=job_body("idle", pair(1.0, 1.0))).json()["id"]
    assert [(event["type"], event["data"]) for event in events_of(http, job)] == [
        ("training_started", {"num_sequences": 0}),
        ("training_ended", {}),
    ]
    assert steps_of(http, "idle") == [1, 0]


def test_a_model_is_logged_and_deleted(server: ServerProcess, http: httpx.Client) -> None:
    created(http, "short")
    seen = group(trajectory(0.5, choice(("token_id:5", -1.0))))
    log = {"model_id": "short", "trajectory_groups": [seen], "split": "val"}
    assert http.post(f"{MODELS}/short/log", json=log).status_code == 200
    assert (server.data_dir / "art" / "short" / "val" / "0000.jsonl").exists()
    assert http.delete(f"{MODELS}/short").status_code == 200
    assert http.get(f"{MODELS}/short/checkpoints").status_code == 404
    assert "short" not in [one["id"] for one in http.get("/v1/models").json()["data"]]


def test_what_is_wrong_is_refused_by_name(http: httpx.Client) -> None:
    created(http, "strict")
    wrong = http.post(JOBS, json=job_body("strict", pair(), mask_prob_ratio=True))
    assert wrong.status_code == 400
    assert "experimental_config.mask_prob_ratio" in wrong.json()["error"]["message"]
    assert http.post(JOBS, json=job_body("nobody", pair())).status_code == 404
    newest = http.request("DELETE", f"{MODELS}/strict/checkpoints", json={"steps": [0]})
    assert "step 0 is the newest" in newest.json()["error"]["message"]
    assert http.get(f"{JOBS}/ftjob-none/events").status_code == 404
    again = {"project": "p", "name": "strict", "base_model": "tiny"}
    assert http.post(MODELS, json=again).status_code == 409
