"""The limits of uploads and jobs: refused where they come in, by line and field, and by both numbers."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from etude.server import hyperparameters as job_size
from etude.server.files import check_training_file
from etude.server.hyperparameters import hyperparameters_for, resolved
from etude.server.settings import server_settings
from etude.wire.api_error import ApiError
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


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'])
def test_a_line_that_cannot_be_read_is_refused_with_its_number(line: bytes) -> None:
    lines = json.dumps(TALK).encode() + b"\n" + line
    with pytest.raises(ApiError, match=r"rows.jsonl, line 2: not JSON: "):
        check_training_file("rows.jsonl", io.BytesIO(lines))


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


def test_a_job_that_does_not_fit_into_memory_is_refused_by_both_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(model=str(model), name="tiny", data_dir=tmp_path, device="cpu")
    full = resolved("supervised", hyperparameters_for("supervised", lora_rank=0), 8, None, fine_tuned=False)
    lora = full | {"lora_rank": 4}
    needed = job_size.memory_of_job(settings, full)
    less = job_size.memory_of_job(settings, lora)
    # float32: the gradient and AdamW's two moments are three times the weights.
    assert needed.gradients + needed.moments == 3 * needed.weights and not needed.copies
    assert less.weights == needed.weights and less.moments < needed.moments
    monkeypatch.setattr(job_size, "total_memory", lambda: less.total)
    job_size.require_doable(settings, lora, rows=8, place="here")
    monkeypatch.setattr(job_size, "total_memory", lambda: needed.total // 2)
    with pytest.raises(ApiError, match=r"takes about .* of memory .* and this machine's cpu has ") as caught:
        job_size.require_doable(settings, full, rows=8, place="here")
    assert caught.value.code == "insufficient_memory" and caught.value.status_code == 400
    monkeypatch.setattr(job_size, "available_memory", lambda device: 1000)
    with pytest.raises(ApiError, match=r"and 1\.0 kB are free on cpu"):
        job_size.require_room(settings, lora)
