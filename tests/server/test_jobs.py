"""Jobs of a server, as the official client asks for them."""

import json
from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

from tests.server.data import ASK, YES, create, dpo, grpo, messages, supervised_rows, upload, wait
from tests.support import one_quick

NO_LORA = {"lora_rank": 0, "lora_alpha": 8}


def logprob(client: openai.OpenAI, model: str, text: str = "y") -> float:
    """Of the first token of the answer being `text`, as far as the model tells."""
    answer = client.chat.completions.create(
        model=model, messages=[ASK], max_tokens=1, temperature=0, logprobs=True, top_logprobs=20
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    found = {one.token: one.logprob for one in logprobs.content[0].top_logprobs}
    return max((value for token, value in found.items() if token.startswith(text)), default=-99.0)


def check_wire(job: FineTuningJob, client: openai.OpenAI) -> None:
    """Everything that the API tells of a job is what the SDK's types say."""
    if job.method is not None and job.method.type != "grpo":  # type: ignore[comparison-overlap]
        FineTuningJob.model_validate(job.model_dump())
    for event in client.fine_tuning.jobs.list_events(job.id):
        FineTuningJobEvent.model_validate(event.model_dump())


@pytest.mark.parametrize("rank", one_quick(4, 0))
def test_supervised_from_file_to_a_model_that_answers(client: openai.OpenAI, rank: int) -> None:
    marked = b"\xef\xbb\xbf" + "".join(json.dumps(row) + "\n" for row in supervised_rows(8)).encode()
    file = client.files.create(file=("with a byte order mark.jsonl", marked), purpose="fine-tune").id
    held_out = upload(client, supervised_rows(2))
    request = {"suffix": "says-yes", "seed": 1, "validation_file": held_out, "metadata": {"run": "r1"}}
    options = {"n_epochs": 4, "batch_size": 4, "learning_rate": 0.02, "lora_rank": rank}
    job = create(client, file, request=request, **options)
    assert job.status == "queued" and job.fine_tuned_model is None
    job = wait(client, job.id)
    assert job.status == "succeeded", (job.error, messages(client, job.id))
    check_wire(job, client)
    assert job.fine_tuned_model is not None and job.fine_tuned_model.startswith("ft:tiny:says-yes:")
    assert job.metadata == {"run": "r1"} and job.seed == 1 and job.trained_tokens
    answer = client.chat.completions.create(
        model=job.fine_tuned_model, messages=[ASK], temperature=0, max_tokens=5
    )
    assert answer.choices[0].message.content == YES["content"]
    steps = [event for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"][::-1]
    assert [event.data["step"] for event in steps] == list(range(1, 9))
    assert {"train_loss", "learning_rate", "tokens_per_s", "total_steps"} <= steps[0].data.keys()
    assert steps[-1].data["train_loss"] < steps[0].data["train_loss"]
    assert steps[-1].data["valid_loss"] < steps[1].data["valid_loss"]
    assert logprob(client, "tiny") < logprob(client, job.fine_tuned_model)


@pytest.mark.slow
def test_dpo_prefers_what_was_preferred_and_goes_on_from_a_fine_tuned_model(client: openai.OpenAI) -> None:
    file = upload(client, dpo(8))
    options = {"n_epochs": 4, "batch_size": 8, "learning_rate": 0.02, "lora_rank": 4, "beta": 0.1}
    first = wait(client, create(client, file, "dpo", **options).id)
    assert first.status == "succeeded" and first.fine_tuned_model, first.error
    check_wire(first, client)
    assert logprob(client, first.fine_tuned_model) > logprob(client, "tiny")
    again = {"n_epochs": 2, "batch_size": 8, "learning_rate": 0.02, "lr_schedule": "linear"}
    second = wait(client, create(client, file, "dpo", request={"model": first.fine_tuned_model}, **again).id)
    assert second.status == "succeeded" and second.fine_tuned_model, second.error
    assert second.fine_tuned_model.startswith("ft:tiny::")
    assert second.method is not None and second.method.dpo is not None
    assert second.method.dpo.hyperparameters.model_dump()["lora_rank"] == 4
    last, first_step = [e.data for e in client.fine_tuning.jobs.list_events(second.id) if e.type == "metrics"]
    # The reference is the model that it starts from, so the first step finds no difference yet.
    assert first_step["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert [first_step["learning_rate"], last["learning_rate"]] == pytest.approx([0.02, 0.01])


def test_grpo_learns_from_what_the_server_sampled(client: openai.OpenAI) -> None:
    file = upload(client, grpo(client, "tiny", groups=3))
    job = wait(client, create(client, file, "grpo", learning_rate=0.01, lora_rank=4).id)
    assert job.status == "succeeded" and job.fine_tuned_model, job.error
    check_wire(job, client)
    client.chat.completions.create(model=job.fine_tuned_model, messages=[ASK], max_tokens=2)
    (step,) = [event for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
    # The learner's logprobs of the tokens are those that the engine told when it sampled them.
    assert step.data["sampled_kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_job_is_created_once_for_an_idempotency_key(client: openai.OpenAI) -> None:
    file = upload(client, supervised_rows(2))
    header = {"extra_headers": {"Idempotency-Key": "run-1/epoch-3"}}
    first = create(client, file, request=header, n_epochs=500)
    assert create(client, file, request=header, n_epochs=500).id == first.id
    with pytest.raises(openai.ConflictError) as caught:
        create(client, file, request=header, n_epochs=2)
    assert caught.value.code == "idempotency_key_reused"
    # What counts is what a file has in it, and not when it was uploaded.
    assert create(client, upload(client, supervised_rows(2)), request=header, n_epochs=500).id == first.id
    with pytest.raises(openai.ConflictError, match="by another request"):
        create(client, upload(client, supervised_rows(3)), request=header, n_epochs=500)
    with pytest.raises(openai.ConflictError, match="by another request"):
        create(client, upload(client, dpo(2)), "dpo", request=header, n_epochs=500)
    client.fine_tuning.jobs.cancel(first.id)


def test_jobs_and_their_events_come_in_pages(client: openai.OpenAI) -> None:
    file = upload(client, supervised_rows(2))
    jobs, request = client.fine_tuning.jobs, {"metadata": {"page": "1"}}
    made = [create(client, file, request=request, n_epochs=9).id for _ in range(3)]
    for job in made:
        jobs.cancel(job)
    wanted: Any = {"page": "1"}
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2, metadata=wanted)] == made[::-1]
    first = client.fine_tuning.jobs.list(limit=2, metadata=wanted)
    assert first.has_more and len(first.data) == 2
    told = [event.id for event in client.fine_tuning.jobs.list_events(made[-1], limit=2)]
    assert len(set(told)) == len(told) > 2
    for ask in (lambda: jobs.list(after="ftjob-gone"), lambda: jobs.list_events(made[0], after=told[0])):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.param == "after"


@pytest.mark.parametrize(
    ("changed", "param", "told"),
    [
        ({"model": "gone"}, "model", "no model"),
        ({"training_file": "file-gone"}, "training_file", "no file"),
        ({"validation_file": "file-gone"}, "validation_file", "no file"),
        ({"suffix": "../up"}, "suffix", "letters"),
        ({"seed": -1}, "seed", "greater"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "512"),
        ({"method": {"type": "dpo"}}, "training_file", "rows for supervised"),
        ({"method": {"type": "reward"}}, "method.type", "supervised"),
        *(
            (
                {"method": {"type": "supervised", "supervised": {"hyperparameters": {name: value}}}},
                f"method.supervised.hyperparameters.{name}",
                told,
            )
            for name, value, told in (
                ("n_epochs", 0, "greater"),
                ("n_epochs", True, "valid integer"),
                ("lora_rank", 10**12, "less than "),
                ("learning_rate", 1e308, "less than .* 10,"),
            )
        ),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": NO_LORA}}},
            "method.supervised.hyperparameters.lora_rank",
            "lora_alpha is for LoRA weights",
        ),
        ({"method": {"type": "supervised", "dpo": {}}}, "method", "options for dpo"),
        ({"extra_body": {"typo": 1}}, "typo", "not permitted"),
        ({"hyperparameters": {"n_epochs": 2}}, "hyperparameters", '"supervised": {"hyperparameters"'),
        ({"extra_body": {"method": None}}, "method", "extract fields from('|$)"),
        ({"extra_headers": {"Content-Type": "text/plain"}}, None, "application/json.*found text/plain"),
    ],
)
def test_a_wrong_job_is_refused_with_its_field(
    client: openai.OpenAI, changed: dict, param: str, told: str
) -> None:
    file = upload(client, supervised_rows(2))
    with pytest.raises(openai.APIStatusError, match=told) as caught:
        client.fine_tuning.jobs.create(**{"model": "tiny", "training_file": file} | changed)
    assert caught.value.status_code == (404 if param == "model" else 400)
    assert caught.value.param == param


def test_unknown_jobs_are_404s(client: openai.OpenAI) -> None:
    jobs = client.fine_tuning.jobs
    for ask in (jobs.retrieve, jobs.cancel, jobs.list_events):
        with pytest.raises(openai.NotFoundError) as caught:
            ask("ftjob-000000000000000000000000")
        assert caught.value.code == "fine_tune_not_found"


def test_a_row_that_the_model_cannot_take_fails_the_job_with_its_place(client: openai.OpenAI) -> None:
    long = {"messages": [ASK | {"content": "0123456789" * 50}, YES]}
    good, wrong = (upload(client, [*supervised_rows(2), *more]) for more in ((), (long,)))
    job = wait(client, create(client, good, request={"validation_file": wrong}).id)
    assert job.status == "failed" and job.error is not None
    assert f"{wrong}, line 3: it has" in job.error.message and "128" in job.error.message
    assert job.fine_tuned_model is None


@pytest.mark.slow
def test_a_fine_tuned_model_can_be_deleted(client: openai.OpenAI) -> None:
    job = wait(client, create(client, upload(client, supervised_rows(2)), n_epochs=1).id)
    name = job.fine_tuned_model
    assert name is not None
    client.chat.completions.create(model=name, messages=[ASK], max_tokens=1)
    assert name in [model.id for model in client.models.list()]
    assert client.models.retrieve(name).id == name
    assert client.models.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=name, messages=[ASK])
    with pytest.raises(openai.BadRequestError, match="base model"):
        client.models.delete("tiny")
