"""Reinforcement jobs: answers sampled, graded and learned from by the server itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJob
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from etude.core.call import Constraint
from etude.server.reinforcement import constraint_of
from etude.store.lock import locked_by
from tests.server.data import ASK, messages, upload, wait, wait_for_step
from tests.server.process import ServerProcess
from tests.server.test_pause import wait_until_free, weights_of

PYTHON: Any = {
    "type": "python",
    "name": "words",
    "source": (
        "def grade(sample, item):\n"
        "    text = sample['output_text']\n"
        "    return sum(text.count(letter) for letter in item['letters']) / max(len(text), 1)"
    ),
}
LIKE: Any = {
    "type": "text_similarity",
    "name": "like",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.reference_answer }}",
    "evaluation_metric": "fuzzy_match",
}
OPTIONS = {"n_epochs": 3, "batch_size": 2, "learning_rate": 0.02, "lora_rank": 4, "max_tokens": 6}


def prompts(count: int = 4) -> list[dict[str, Any]]:
    return [
        {
            "messages": [{"role": "user", "content": f"what is 1 + {number}?"}],
            "reference_answer": "yes, yes",
            "letters": ["y", "e", "s"],
        }
        for number in range(count)
    ]


def create(
    client: openai.OpenAI, file: str, grader: Any = LIKE, request: Any = None, **options: Any
) -> FineTuningJob:
    part = {"grader": grader, "hyperparameters": OPTIONS | options}
    method: Any = {"type": "reinforcement", "reinforcement": part}
    base: Any = {"model": "tiny", "training_file": file, "method": method, "seed": 3}
    return client.fine_tuning.jobs.create(**base | (request or {}))


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, tmp_path) as running:
        yield running


@pytest.mark.slow
def test_a_job_learns_what_its_grader_rewards(server: ServerProcess) -> None:
    client = server.client()
    file, held_out = upload(client, prompts(8)), upload(client, prompts(2))
    says: Any = {"type": "string_check", "operation": "ilike", "input": "{{ sample.output_text }}"}
    both: Any = {
        "type": "multi",
        "name": "both",
        "graders": {"says": says | {"reference": "y"}, "like": LIKE},
        "calculate_output": "(says + like) / 2",
    }
    request = {"validation_file": held_out, "suffix": "rft"}
    options = {"n_epochs": 12, "batch_size": 4, "learning_rate": 0.01, "compute_multiplier": 2.0}
    options |= {"eval_interval": 12, "eval_samples": 16, "lora_rank": 0}
    job = create(client, file, both, request, **options)
    assert job.method is not None and job.method.reinforcement is not None
    assert job.method.reinforcement.grader.type == "multi"
    job = wait(client, job.id)
    assert job.status == "succeeded", (job.error, messages(client, job.id), server.log.read_text())
    assert job.fine_tuned_model is not None and job.trained_tokens
    events = [each.data for each in client.fine_tuning.jobs.list_events(job.id) if each.type == "metrics"][
        ::-1
    ]
    assert [event["step"] for event in events] == list(range(1, 25))
    assert {event["train_answers"] for event in events} == {64.0}
    rewards = [event["train_mean_reward"] for event in events]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    # The learner's logprobs of what was sampled for a step are those of the weights of that step.
    assert all(abs(event["sampled_kl"]) < 1e-5 for event in events)
    evaluated = [event["valid_mean_reward"] for event in events if "valid_mean_reward" in event]
    assert len(evaluated) == 2 and evaluated[1] > evaluated[0]
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [checkpoint.step_number for checkpoint in checkpoints] == [24, 22, 20]
    FineTuningJobCheckpoint.model_validate(checkpoints[0].model_dump())
    header, *lines = client.files.content(job.result_files[0]).text.splitlines()
    assert header.endswith("train_mean_reward,valid_mean_reward") and len(lines) == 24


@pytest.mark.slow
def test_pause_and_kill_9_change_nothing_about_the_weights(server: ServerProcess) -> None:
    client = server.client()
    file = upload(client, prompts(8))
    straight = wait(client, create(client, file, n_epochs=10).id)
    assert straight.status == "succeeded", straight.error
    FineTuningJob.model_validate(straight.model_dump())
    job = create(client, file, n_epochs=10).id
    wait_for_step(client, job, 2)
    client.fine_tuning.jobs.pause(job)
    wait_until_free(server, job)
    server.kill()
    server.start()
    client = server.client()
    client.fine_tuning.jobs.resume(job)
    started = len([text for text in messages(client, job) if text.startswith("Step ")])
    wait_for_step(client, job, started + 2)
    worker = locked_by(server.data_dir / "jobs" / job / "lock")
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    done = wait(client, job)
    assert done.status == "succeeded", done.error
    assert any("signal 9" in text for text in messages(client, job))
    assert weights_of(server, job) == weights_of(server, straight.id)
    cancelled = create(client, file, n_epochs=100).id
    wait_for_step(client, cancelled, 1)
    assert client.fine_tuning.jobs.cancel(cancelled).status == "cancelled"
    wait_until_free(server, cancelled)


@pytest.mark.slow
def test_a_grader_that_has_no_score_ends_the_job_with_the_reason(server: ServerProcess) -> None:
    client = server.client()
    broken = PYTHON | {"source": "def grade(sample, item): return item['gone']"}
    job = wait(client, create(client, upload(client, prompts(2)), broken).id)
    assert job.status == "failed" and job.error is not None
    assert "python_grader_runtime_error" in job.error.message and "gone" in job.error.message
    judge: Any = {"type": "score_model", "model": "tiny", "input": [{"role": "user", "content": "Good?"}]}
    job = wait(client, create(client, upload(client, prompts(2)), judge).id)
    assert job.error is not None and "judge 'tiny': the model's context is" in job.error.message
    same = LIKE | {"input": "a", "reference": "a"}
    job = wait(client, create(client, upload(client, prompts(2)), same).id)
    assert job.status == "failed" and job.error is not None
    assert "changed no weight" in job.error.message
    strange = create(client, upload(client, prompts(2)), reasoning_effort="low")
    job = wait(client, strange.id)
    assert job.error is not None and "does not know reasoning_effort" in job.error.message


@pytest.mark.parametrize(
    ("changed", "param", "said"),
    [
        ({"method": {"type": "reinforcement"}}, "method.reinforcement.grader", "required"),
        ({"grader": {"type": "endpoint"}}, "method.reinforcement.grader", "endpoint"),
        (
            {"options": {"eval_samples": 2}},
            "method.reinforcement.hyperparameters.eval_samples",
            "validation_file",
        ),
        (
            {"options": {"compute_multiplier": 1000}},
            "method.reinforcement.hyperparameters.compute_multiplier",
            "256",
        ),
        ({"options": {"typo": 1}}, "method.reinforcement.hyperparameters.typo", "not permitted"),
        ({"judge": "gone"}, "method.reinforcement.grader", "no model of this server"),
        (
            {"rows": [{"messages": [ASK, {"role": "assistant", "content": "yes"}]}]},
            "training_file",
            "rows for supervised",
        ),
    ],
)
def test_a_wrong_job_is_refused_with_its_field(
    shared: openai.OpenAI, changed: dict[str, Any], param: str, said: str
) -> None:
    judge = {
        "type": "score_model",
        "model": changed.get("judge"),
        "input": [{"role": "user", "content": "?"}],
    }
    grader = judge if "judge" in changed else changed.get("grader", LIKE)
    file = upload(shared, changed.get("rows", prompts(2)))
    request = {"method": changed["method"]} if "method" in changed else {}
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        create(shared, file, grader, request, **changed.get("options", {}))
    assert caught.value.param == param


def test_a_response_format_is_the_form_of_the_answers(shared: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}}
    part = {"grader": LIKE, "hyperparameters": OPTIONS, "response_format": wanted}
    method: Any = {"type": "reinforcement", "reinforcement": part}
    job = create(shared, upload(shared, prompts(2)), request={"method": method})
    shared.fine_tuning.jobs.cancel(job.id)
    shown = job.model_dump()["method"]["reinforcement"]["response_format"]
    assert shown == wanted
    constraint = constraint_of(shown)
    assert constraint is not None and constraint.kind == "json_schema"
    assert json.loads(constraint.text) == schema
    assert constraint_of({"type": "json_object"}) == Constraint("json_object")
    assert constraint_of({"type": "text"}) is constraint_of(None) is None
    part["response_format"] = {"type": "json_schema"}
    with pytest.raises(openai.BadRequestError, match="needs it"):
        create(shared, upload(shared, prompts(2)), request={"method": method})


@pytest.mark.slow
def test_a_judge_cannot_be_deleted_while_a_job_needs_it(shared: openai.OpenAI) -> None:
    part: Any = {"type": "score_model", "model": "tiny", "input": [{"role": "user", "content": "?"}]}
    file = upload(shared, prompts(2))
    first = wait(shared, create(shared, file, n_epochs=1).id)
    assert first.fine_tuned_model is not None, first.error
    job = create(shared, file, part | {"model": first.fine_tuned_model})
    shared.fine_tuning.jobs.pause(job.id)
    with pytest.raises(openai.ConflictError, match=job.id):
        shared.models.delete(first.fine_tuned_model)
    shared.fine_tuning.jobs.cancel(job.id)
    assert shared.models.delete(first.fine_tuned_model).deleted


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with ServerProcess(model, tmp_path_factory.mktemp("reinforcement")) as running:
        yield running.client()
