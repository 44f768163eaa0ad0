"""Graders at the server, with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.fine_tuning.alpha import GraderRunResponse, GraderValidateResponse

from tests.server.process import ServerProcess

CHECK: Any = {
    "type": "string_check",
    "name": "says",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.word }}",
    "operation": "ilike",
}
PYTHON: Any = {"type": "python", "name": "share", "source": "def grade(sample, item): return 1 / item['n']"}
JUDGE: Any = {
    "type": "score_model",
    "name": "judge",
    "model": "tiny",
    "input": [{"role": "user", "content": "{{ sample.output_text }}"}],
    "sampling_params": {"max_completions_tokens": 4},
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


def run(client: openai.OpenAI, grader: Any, item: Any = None) -> GraderRunResponse:
    graders = client.fine_tuning.alpha.graders
    result = graders.run(grader=grader, model_sample="Yes.", item=item or {"word": "yes", "n": 4})
    return GraderRunResponse.model_validate(result.model_dump(by_alias=True))


def test_graders_are_run_and_validated(client: openai.OpenAI) -> None:
    both: Any = {
        "type": "multi",
        "name": "both",
        "graders": {"a": CHECK, "b": PYTHON},
        "calculate_output": "a + b",
    }
    result = run(client, both)
    assert result.reward == 1.25 and result.sub_rewards == {"a": 1.0, "b": 0.25}
    assert result.metadata.type == "multi" and result.metadata.execution_time > 0
    for grader in (CHECK, PYTHON, JUDGE):
        checked = client.fine_tuning.alpha.graders.validate(grader=grader)
        assert GraderValidateResponse.model_validate(checked.model_dump()).grader is not None
    checked = client.fine_tuning.alpha.graders.validate(grader=CHECK)
    assert checked.model_dump(exclude_none=True) == {"grader": CHECK}


def test_a_run_without_a_reward_says_why(client: openai.OpenAI) -> None:
    result = run(client, PYTHON, {"n": 0})
    assert result.reward == 0 and result.metadata.errors.python_grader_runtime_error
    assert "ZeroDivisionError" in str(result.metadata.errors.python_grader_runtime_error_details)
    assert run(client, CHECK, {"n": 0}).metadata.errors.invalid_variable_error
    # The tiny model cannot even read the question.
    errors = run(client, JUDGE).metadata.errors
    assert errors.api_model_grader_server_error
    assert "context is 128 tokens" in str(errors.api_model_grader_server_error_details)


@pytest.mark.parametrize(
    ("grader", "param", "said"),
    [
        (CHECK | {"operation": "regex"}, "grader.string_check.operation", "eq"),
        (JUDGE | {"model": "gone"}, "grader", "no model of this server"),
        ({"type": "label_model"}, "grader.label_model.model", "required"),
        ({"type": "endpoint"}, "grader", "endpoint"),
    ],
)
def test_wrong_graders_are_refused_with_their_field(
    client: openai.OpenAI, grader: Any, param: str, said: str
) -> None:
    for ask in (
        lambda: client.fine_tuning.alpha.graders.validate(grader=grader),
        lambda: client.fine_tuning.alpha.graders.run(grader=grader, model_sample=""),
    ):
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            ask()
        assert caught.value.param == param
