"""A real vLLM behind `etude serve` gives answers every form that can be asked for, and pauses for jobs.

ETUDE_TEST_VLLM=path/to/vllm pytest -m vllm
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from tests.server.data import ASK, create, supervised, upload, wait, wait_for_step
from tests.server.process import ServerProcess
from tests.vllm import choose_command

pytestmark = pytest.mark.vllm

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 9}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("forms")
    tokenizer = build_tokenizer(["what is 1 + 2? it is 3. yes or no? yes, no."], vocab_size=300)
    shape = TinyShape(hidden_size=64, heads=2, intermediate_size=48, max_context=1024)
    build_policy(tokenizer, 0, shape).export(folder / "tiny")
    with pytest.MonkeyPatch.context() as monkeypatch:
        (command,) = choose_command("real", monkeypatch)
        options = ["--engine", "vllm", "--vllm-command", command, "--vllm-arg=--enforce-eager"]
        with ServerProcess(folder / "tiny", folder, *options, "--engine-wait", "300") as running:
            yield running


def ask(server: ServerProcess, **asked: Any) -> Any:
    asked = {"model": "tiny", "messages": [ASK], "max_tokens": 400, "seed": 3} | asked
    return server.client(timeout=300).chat.completions.create(**asked)


JSON = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_answers_have_their_form(server: ServerProcess, streams: bool) -> None:
    if streams:
        pieces = [
            piece.choices[0] for piece in ask(server, stream=True, response_format=JSON) if piece.choices
        ]
        text, ended = "".join(piece.delta.content or "" for piece in pieces), pieces[-1].finish_reason
    else:
        (choice,) = ask(server, response_format=JSON).choices
        text, ended = choice.message.content, choice.finish_reason
    assert ended == "stop" and set(json.loads(text)) == {"sum", "sure"}


def test_tools_are_called_as_the_choice_says(server: ServerProcess) -> None:
    named = {"type": "function", "function": {"name": "check"}}
    message = (
        ask(server, tools=[tool("add", strict=True), tool("check")], tool_choice=named).choices[0].message
    )
    assert [call.function.name for call in message.tool_calls] == ["check"]
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"sum", "sure"}


def test_a_form_that_no_answer_can_have_is_refused(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="held to its regex"):
        ask(server, extra_body={"structured_outputs": {"regex": "("}})


def test_a_job_is_paused_and_resumed_beside_vllm(server: ServerProcess) -> None:
    client = server.client(timeout=300)
    options = {"n_epochs": 6, "batch_size": 1, "learning_rate": 0.001, "lora_rank": 4}
    job = create(client, upload(client, supervised(8)), **options).id
    wait_for_step(client, job, 2)
    assert client.fine_tuning.jobs.pause(job).status == "paused"
    assert ask(server, max_tokens=3).choices
    client.fine_tuning.jobs.resume(job)
    done = wait(client, job)
    assert done.status == "succeeded", done.error
    assert ask(server, model=done.fine_tuned_model, max_tokens=3).choices
