"""ART's protocol on a real server, spoken plainly: register, sample, train, next step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.art_client import (
    ASK,
    RATE,
    choice,
    gathered,
    group,
    lines_of,
    mean_reward,
    model_of,
    pair,
    train_body,
    trajectory,
)
from tests.server.process import ServerProcess


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(model, tmp_path_factory.mktemp("art"), "--max-models", "2") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.http(timeout=120) as client:
        yield client


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def registered(http: httpx.Client, name: str, **more: object) -> dict[str, object]:
    model = model_of(name, **more)
    assert http.post("/register", json=model).json() is None
    return model


def names(http: httpx.Client, name: str) -> list[str]:
    listed = [one["id"] for one in http.get("/v1/models").json()["data"]]
    return sorted(one for one in listed if one.partition("@")[0] == name)


@pytest.mark.slow
def test_steps_are_trained_and_each_answers_under_its_name(server: ServerProcess, http: httpx.Client) -> None:
    model = registered(http, "agent")
    address, key = http.post("/_prepare_backend_for_training", json={"model": model, "config": None}).json()
    assert (address, key) == (f"{server.address}/v1", "default")
    client = openai.OpenAI(base_url=address, api_key=key, max_retries=0)
    rewards = []
    for step in range(3):
        assert http.post("/_get_step", json=model).json() == step
        groups = gathered(client, "agent", seed=10 * step)
        rewards.append(mean_reward(groups))
        body = train_body(model, *groups, config={"beta": 0.001})
        lines = lines_of(http.post("/_train_model", json=body))
        assert [line["num_gradient_steps"] for line in lines] == [1]
        assert lines[0]["data/step_num_gradient_steps"] == 1.0
        assert lines[0]["data/step_num_drifted_prompts"] == lines[0]["data/step_num_found_tokens"] == 0
        # The reference is the base model, and not the step before.
        assert (lines[0]["reference_kl"] > 0.001) == (step > 0)
        # The tokens and logprobs that were sampled are those that are trained on.
        assert abs(lines[0]["sampled_kl"]) < 1e-6 and lines[0]["learning_rate"] == RATE
    assert mean_reward(gathered(client, "agent", seed=99)) > rewards[0] + 0.2, rewards
    assert names(http, "agent") == ["agent", "agent@0", "agent@1", "agent@2", "agent@3"]
    untrained = mean_reward(gathered(client, "agent@0", seed=99))
    assert untrained == mean_reward(gathered(client, "tiny", seed=99))
    http.post("/_delete_checkpoint_files", json={"model": model, "steps_to_keep": [2]}).raise_for_status()
    assert names(http, "agent") == ["agent", "agent@2", "agent@3"]
    listed = [one["id"] for one in http.get("/v1/models").json()["data"] if one["id"].startswith("ft:")]
    assert sum("ckpt" not in one for one in listed) == 2
    assert http.post("/_get_step", json=model).json() == 3


def test_a_step_without_anything_to_learn_says_so_and_keeps_the_weights(
    server: ServerProcess, http: httpx.Client
) -> None:
    model = registered(http, "flat")
    (line,) = lines_of(http.post("/_train_model", json=train_body(model, pair(1.0, 1.0))))
    assert line["num_gradient_steps"] == line["data/step_num_groups_trainable"] == 0
    assert http.post("/_get_step", json=model).json() == 1
    ask = {"messages": ASK, "seed": 5, "max_tokens": 8}
    first, second = (
        server.client().chat.completions.create(model=name, **ask).choices[0].message  # type: ignore[call-overload]
        for name in ("flat@0", "flat@1")
    )
    assert first == second
    assert "flat@1: nothing to learn from" in server.log.read_text()


def test_tokens_are_told_by_their_ids_unless_a_client_wants_their_texts(
    server: ServerProcess, http: httpx.Client
) -> None:
    registered(http, "teller")
    ask = {"messages": ASK, "max_tokens": 2}
    client = server.client()
    told = client.chat.completions.create(model="teller", **ask).choices[0]  # type: ignore[call-overload]
    assert all(token.token.startswith("token_id:") for token in told.logprobs.content)
    silent = client.chat.completions.create(model="teller", logprobs=False, **ask)  # type: ignore[call-overload]
    assert silent.choices[0].logprobs is None
    plain = client.chat.completions.create(model="tiny", **ask)  # type: ignore[call-overload]
    assert plain.choices[0].logprobs is None


def test_what_cannot_be_registered_is_refused_by_name(http: httpx.Client, server: ServerProcess) -> None:
    registered(http, "taken")
    registered(http, "taken")
    told = refused(http.post("/register", json=model_of("taken", project="other")), 409)
    assert "project 'p' has a model 'taken' here" in told
    other = model_of("x") | {"base_model": "Qwen/Qwen2.5-7B-Instruct"}
    assert "this server trains 'tiny'" in refused(http.post("/register", json=other), 400)
    assert "name of another model" in refused(http.post("/register", json=model_of("tiny")), 409)
    for name in ("", "a@1", "../x", "ft:x"):
        refused(http.post("/register", json=model_of(name)), 400)
    assert "register it first" in refused(http.post("/_get_step", json=model_of("nobody")), 404)
    # ART's client shows nothing but the status.
    assert "/_get_step: there is no model 'nobody'" in server.log.read_text()
    prompted = {"name": "gpt-4.1", "project": "p", "trainable": False, "config": None}
    assert http.post("/register", json=prompted).status_code == 200
    assert http.post("/_get_step", json=prompted).json() == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dev_config": {"mask_prob_ratio": True}}, "dev_config.mask_prob_ratio"),
        ({"dev_config": {"importance_sampling_level": "average"}}, "dev_config.importance_sampling_level"),
        ({"dev_config": {"made_up": 1}}, "dev_config.made_up"),
        ({"config": {"betas": 1}}, "config.betas"),
        ({"config": {"learning_rate": -1}}, "config.learning_rate"),
        ({"config": {"beta": 0.1, "kl_penalty_coef": 0.2}}, "they are 0.1 and 0.2"),
        ({"model": model_of("wrong", peft_args={"use_rslora": True})}, "use_rslora"),
        ({"model": model_of("wrong", trainer_args={"optim": "lion_8bit"})}, "optim"),
        ({"model": model_of("wrong", init_args={"rope_scaling": {"factor": 2}})}, "init_args.rope_scaling"),
    ],
)
def test_an_option_is_honoured_or_refused_by_its_name(
    http: httpx.Client, change: dict[str, object], told: str
) -> None:
    model = registered(http, "wrong")
    assert told in refused(http.post("/_train_model", json=train_body(model, pair()) | change), 400)
    assert http.post("/_get_step", json=model).json() == 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([{"content": "no role"}, choice(("token_id:5", -1.0))], "must be a dict with a role"),
        ([*ASK, choice(("token_id:4000", -1.0))], "token_id:4000 is not in the vocabulary"),
        ([*ASK, choice(("two words", -1.0))], "'two words' is named by a text that is not one token"),
        ([*ASK, choice(*[("token_id:5", -1.0)] * 200)], "the model's context ends at 128"),
        ([*ASK, choice(("token_id:5", -1.0), message="said")], "message"),
    ],
)
def test_a_wrong_trajectory_is_refused_with_its_place(
    http: httpx.Client, wrong: list[dict[str, object]], told: str
) -> None:
    model = registered(http, "wrong")
    bad = trajectory(0.0) | {"messages_and_choices": wrong}
    body = train_body(model, pair(), group(trajectory(1.0, choice(("token_id:5", -1.0))), bad))
    found = refused(http.post("/_train_model", json=body), 400)
    assert found.startswith("trajectory_groups[1].trajectories[1].messages_and_choices[1]: ")
    assert told in found


def test_logged_trajectories_are_kept_and_tell_the_best_step(
    server: ServerProcess, http: httpx.Client
) -> None:
    model = registered(http, "logger")
    for reward in (0.2, 0.9, 0.4):
        seen = group(trajectory(reward, choice(("token_id:5", -1.0)), metrics={"won": reward > 0.3}))
        body = {"model": model, "trajectory_groups": [seen], "split": "val"}
        http.post("/_log", json=body).raise_for_status()
        lines_of(http.post("/_train_model", json=train_body(model, pair(1.0, 1.0))))
    kept = (server.data_dir / "art" / "logger" / "val" / "0001.jsonl").read_text()
    assert '"reward": 0.9' in kept and '"content": "yes"' in kept and "token_id" not in kept
    params = {"benchmark": "val/reward", "benchmark_smoothing": 1.0}
    http.post("/_delete_checkpoints", params=params, json=model).raise_for_status()
    assert names(http, "logger") == ["logger", "logger@1", "logger@3"]
    refused(http.post("/_log", json={"model": model, "trajectory_groups": [], "split": "../x"}), 400)
    assert http.post("/close").json() is None
