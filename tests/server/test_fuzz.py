"""Whatever is asked (by a corpus, or schemathesis), the answer is an answer or an error object."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpus import gateway_cases, play, server_cases, some
from tests.server.process import ServerProcess
from tests.support import drawn, one_quick

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
texts = st.text(max_size=20)
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer", "?"])
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": texts}, optional={"arguments": values})}
)
message = st.fixed_dictionaries(
    {"role": roles},
    optional={"content": texts | values, "tool_calls": st.lists(calls | values, max_size=2), "name": values},
)
tool = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": texts | values})}
)
few = st.integers(-1, 3)
names = ["temperature", "top_p", "seed", "stop", "n", "stream", "logprobs", "top_logprobs", "logit_bias"]
odd = dict.fromkeys([*names, "stream_options", "return_token_ids", "tool_choice", "user"], values)
plain: dict[str, Any] = {"stream": st.booleans(), "n": few, "logprobs": st.booleans() | few, "seed": few}

chats = st.fixed_dictionaries(
    {"model": st.just("tiny"), "max_tokens": few, "messages": st.lists(message | values, max_size=3)},
    optional=odd | plain | {"tools": st.lists(tool | values, max_size=2)},
)
completions = st.fixed_dictionaries(
    {"model": st.just("tiny"), "max_tokens": few, "prompt": values | texts | st.lists(few, max_size=3)},
    optional=odd | plain,
)
tokenizes = st.fixed_dictionaries(
    {}, optional={"prompt": values, "messages": st.lists(message, max_size=2), "tools": st.lists(tool)}
)
jobs = st.fixed_dictionaries(
    {"model": st.sampled_from(["tiny", "gone"]), "training_file": texts},
    optional={
        "method": st.fixed_dictionaries({"type": values}, optional={"dpo": values, "grpo": values}),
        "hyperparameters": st.dictionaries(st.sampled_from(["n_epochs", "lora_rank", "?"]), values),
        "suffix": values,
        "seed": values,
        "metadata": values,
        "validation_file": values,
    },
)
art_model = st.fixed_dictionaries(
    {"name": st.just("nobody") | texts, "project": st.just("p") | values},
    optional={"base_model": st.just("gone") | values, "entity": values, "return_existing": values},
)
trajectory = st.fixed_dictionaries(
    {"messages_and_choices": st.lists(message | values, max_size=3)},
    optional={"reward": st.floats() | values, "tools": values, "additional_histories": values},
)
groups = st.lists(
    st.fixed_dictionaries({"trajectories": st.lists(trajectory | values, max_size=2)}) | values, max_size=2
)
trainings = st.fixed_dictionaries(
    {"model_id": st.just("nobody") | values, "trajectory_groups": groups | values},
    optional={"experimental_config": values},
)
posts = st.one_of(
    st.tuples(st.just("/v1/preview/models"), art_model | values),
    st.tuples(st.just("/v1/preview/training-jobs"), trainings | values),
    st.tuples(st.just("/v1/chat/completions"), chats),
    st.tuples(st.just("/v1/completions"), completions),
    st.tuples(st.just("/tokenize"), tokenizes),
    st.tuples(st.just("/v1/fine_tuning/jobs"), jobs),
)


def check(status: int, text: str) -> None:
    assert status < 500, (status, text)
    if status >= 400:
        error = json.loads(text)["error"]
        assert error["message"] and error["type"] and {"param", "code"} <= error.keys()
    assert '"server_error"' not in text


@settings(max_examples=drawn(30), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(posts)
def test_no_body_makes_the_server_fail(server: ServerProcess, post: tuple[str, Any]) -> None:
    path, body = post
    with server.http(timeout=60) as http:
        told = http.post(
            path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
    check(told.status_code, told.text)


@pytest.mark.parametrize(
    "cases",
    one_quick(
        lambda: some(gateway_cases("tiny"), 24) + some(server_cases("tiny"), 6),
        lambda: gateway_cases("tiny") + server_cases("tiny"),
    ),
    ids=["some", "all"],
)
def test_no_request_makes_a_server_fail(model: Path, tmp_path: Path, cases) -> None:
    """A server of its own: a job that a request makes may train on for a while after it."""
    with ServerProcess(model, tmp_path) as server, server.http(timeout=60) as http:
        problems, lines = [], 0
        for outcome in play(http, cases()):
            logged = server.log.read_text().count("\n")
            problems += [outcome.problem] if outcome.problem else []
            if logged > lines + 1:
                problems.append(f"{outcome.case.name} at {outcome.case.path}: {logged - lines} lines logged")
            lines = logged
        assert not problems, "\n".join(problems)
        assert http.get("/health").status_code == 200
        answer = server.client().completions.create(model="tiny", prompt="yes", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens


def test_the_document_has_the_hyperparameters_that_each_algorithm_declares(server: ServerProcess) -> None:
    with server.http() as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
    method = schemas["MethodBody"]["properties"]
    assert {"dpo", "grpo", "rloo", "supervised"} <= {*method["type"]["enum"]} < {*method}
    assert {"n_epochs", "clip_low", "reference"} <= {*schemas["GrpoHyperparameters"]["properties"]}
    assert "clip_low" not in schemas["DpoHyperparameters"]["properties"]


@pytest.mark.slow
@pytest.mark.parametrize("phases", ["examples,fuzzing", "coverage"])
def test_no_request_of_the_document_makes_the_server_fail(model: Path, tmp_path: Path, phases: str) -> None:
    checks = ["--checks", "not_a_server_error", "--phases", phases]
    # While somebody has stopped the engine, 503 is the right answer.
    checks += ["--exclude-path-regex", "^/engine/", "--max-examples", "15", "--seed", "1"]
    with ServerProcess(model, tmp_path, key="a-key") as server:
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{server.address}/openapi.json",
        ]
        command += ["--header", "authorization: Bearer a-key", "--request-timeout", "60", *checks]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"Tested: [3-9]\d\b", done.stdout), done.stdout
