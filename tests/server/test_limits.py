"""The limits of uploads and jobs: refused where they come in, by line and field, and by both numbers."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from etude.server.files import check_training_file
from etude.wire.http_server import ApiError
from tests.models.tiny_models import policy
from tests.server.data import upload
from tests.server.process import ServerProcess

TALK = {"messages": [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}]}


def group(**changes: Any) -> dict[str, Any]:
    turn = {"context_ids": [3], "token_ids": [4, 5], "logprobs": [-0.1, -0.2]} | changes
    return {"trajectories": [{"turns": [turn], "reward": 1.0}]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"logprobs": [-0.1, 7.5]}, r"trajectories\[0\].turns\[0\].logprobs\[1\]: .*less than or equal"),
        ({"logprobs": [-1e308, -0.1]}, r"logprobs\[0\]: .*greater than or equal to -100000"),
        ({"token_ids": [4, 100]}, r"turns\[0\].token_ids\[1\]: 100 is no token of the model, which has 100"),
        ({"context_ids": [10**9]}, r"turns\[0\].context_ids\[0\]: 1000000000 is no token"),
        ({"token_ids": [4, -1]}, r"turns\[0\].token_ids\[1\]: "),
        ({"advantages": [1e300, 1]}, r"advantages\[0\]: .*less than or equal"),
    ],
)
def test_what_cannot_have_been_sampled_is_refused_with_its_line(
    changes: dict[str, Any], problem: str
) -> None:
    lines = "\n".join(map(json.dumps, (group(), group(**changes))))
    with pytest.raises(ApiError, match=rf"(?s)rows.jsonl, line 2: .*{problem}"):
        check_training_file(
            "rows.jsonl", io.BytesIO(lines.encode()), speech=replace(policy().speech, vocabulary=100)
        )


def test_a_server_knows_its_models_vocabulary(server: ServerProcess) -> None:
    client = server.client()
    assert upload(client, [group(token_ids=[4, 200])])
    with pytest.raises(openai.BadRequestError, match=r"line 1: .*100000 is no token of the model"):
        upload(client, [group(token_ids=[4, 100_000])])


@pytest.mark.parametrize(
    ("options", "param", "problem"),
    [
        ({"lora_rank": 10_000_000}, "lora_rank", "lora_rank is 10000000, and the model's width 32"),
        ({"lora_rank": 10**12}, "lora_rank", "less than or equal"),
        ({"n_epochs": 2_000_000}, "n_epochs", "the job has 2000000 steps"),
        ({"n_epochs": True}, "n_epochs", "valid integer"),
        ({"batch_size": "5"}, "batch_size", "valid integer"),
        ({"learning_rate": 1e308}, "learning_rate", "less than or equal to 10"),
    ],
)
def test_a_job_that_cannot_be_meant_is_refused(
    server: ServerProcess, options: dict[str, Any], param: str, problem: str
) -> None:
    client = server.client()
    file = upload(client, [TALK])
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": options}}
    with pytest.raises(openai.BadRequestError, match=problem) as caught:
        client.fine_tuning.jobs.create(model="tiny", training_file=file, method=method)
    assert str(caught.value.param).startswith(f"method.supervised.hyperparameters.{param}") or (
        caught.value.param == f"method.{param}"
    )
