"""Whatever is asked, the answer is an answer or an error object, and never a failure of the server."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.process import ServerProcess

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


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(posts)
def test_no_body_makes_the_server_fail(server: ServerProcess, post: tuple[str, Any]) -> None:
    path, body = post
    with server.http(timeout=60) as http:
        told = http.post(
            path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
    check(told.status_code, told.text)
