"""A real vLLM behind `etude serve` gives answers every form that can be asked for, and pauses for jobs.

ETUDE_TEST_VLLM=path/to/vllm pytest -m vllm
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from tests.server.data import ASK, create, supervised, upload, wait, wait_for_step
from tests.server.process import ServerProcess
from tests.vllm import command_of

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
        (command,) = command_of("real", monkeypatch)
        options = ["--engine", "vllm", "--vllm-command", command, "--vllm-arg=--enforce-eager"]
        with ServerProcess(folder / "tiny", folder, *options, "--engine-wait", "300") as running:
            yield running


def ask(server: ServerProcess, **asked: Any) -> Any:
    asked = {"model": "tiny", "messages": [ASK], "max_tokens": 400, "seed": 3} | asked
    return server.client(timeout=300).chat.completions.create(**asked)


FORMS = {
    "json_object": (
        {"response_format": {"type": "json_object"}, "seed": 5},
        lambda text: isinstance(json.loads(text), dict),
    ),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}},
        lambda text: set(json.loads(text)) == {"sum", "sure"},
    ),
    "regex": (
        {"extra_body": {"structured_outputs": {"regex": "[0-9]{3}-[a-c]+!"}}},
        lambda text: re.fullmatch("[0-9]{3}-[a-c]+!", text),
    ),
    "choice": (
        {"extra_body": {"structured_outputs": {"choice": ["left", "right"]}}},
        ["left", "right"].__contains__,
    ),
    "grammar": (
        {"extra_body": {"structured_outputs": {"grammar": 'start: "<" NUMBER ">"\nNUMBER: /[0-9]{2}/'}}},
        lambda text: re.fullmatch("<[0-9]{2}>", text),
    ),
}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", FORMS)
def test_answers_have_their_form(server: ServerProcess, name: str, streams: bool) -> None:
    asked, holds = FORMS[name]
    if streams:
        pieces = [piece.choices[0] for piece in ask(server, stream=True, **asked) if piece.choices]
        text, ended = "".join(piece.delta.content or "" for piece in pieces), pieces[-1].finish_reason
    else:
        (choice,) = ask(server, **asked).choices
        text, ended = choice.message.content, choice.finish_reason
    if name == "json_object" and ended == "length":
        assert text.startswith("{"), "any object may be longer than the answer"
    else:
        assert ended == "stop" and holds(text), text


CHOICES: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": {"type": "function", "function": {"name": "check"}}},
    "one": {"tool_choice": "required", "parallel_tool_calls": False},
}


@pytest.mark.parametrize("name", CHOICES)
def test_tools_are_called_as_the_choice_says(server: ServerProcess, name: str) -> None:
    tools = [tool("add", strict=True), tool("check")]
    for seed in range(3):
        message = ask(server, tools=tools, seed=seed, **CHOICES[name]).choices[0].message
        names = [call.function.name for call in message.tool_calls]
        assert names and set(names) <= {"add", "check"}
        assert all(set(json.loads(call.function.arguments)) == {"sum", "sure"} for call in message.tool_calls)
        if name == "named":
            assert names == ["check"]
        if name == "one":
            assert len(names) == 1


def test_strict_tools_and_none_leave_text(server: ServerProcess) -> None:
    strict = ask(server, tools=[tool("add", strict=True)], max_tokens=20).choices[0]
    assert strict.finish_reason in ("stop", "length", "tool_calls")
    assert (
        not ask(server, tools=[tool("add")], tool_choice="none", max_tokens=20).choices[0].message.tool_calls
    )


def test_parameters_go_through(server: ServerProcess) -> None:
    more = {"top_k": 5, "min_p": 0.01, "min_tokens": 4, "repetition_penalty": 1.2, "return_token_ids": True}
    asked = {"frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"40": -100}, "max_tokens": 12}
    choice = ask(server, **asked, logprobs=True, top_logprobs=3, extra_body=more).choices[0]
    assert len(choice.token_ids) >= 4 and 40 not in choice.token_ids
    assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    assert len(ask(server, n=3, max_tokens=4).choices) == 3


def test_the_prompts_logprobs(server: ServerProcess) -> None:
    completion = server.client(timeout=300).completions.create(
        model="tiny", prompt=[5, 40, 41, 42], max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    first, *others = completion.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert first is None and len(others) == 3


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
