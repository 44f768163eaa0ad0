"""Pausing a job and going on with it, as the official client asks for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from etude.store.run_folder import locked_by
from tests.server.data import create, messages, supervised, upload, wait, wait_for_step
from tests.server.process import ServerProcess

OPTIONS = {"n_epochs": 2, "batch_size": 1, "learning_rate": 0.001, "lora_rank": 4, "request": {"seed": 5}}


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, tmp_path, "--checkpoint-steps", "10") as running:
        yield running


def wait_until_free(server: ServerProcess, job: str) -> None:
    """Until no process trains the job."""
    for _ in range(600):
        if locked_by(server.data_dir / "jobs" / job / "lock") is None:
            return
        time.sleep(0.05)
    raise AssertionError("the worker goes on")


def weights_of(server: ServerProcess, job: str) -> bytes:
    return (server.data_dir / "models" / job / "trained.safetensors").read_bytes()


@pytest.mark.slow
def test_a_paused_job_survives_kill_9_and_ends_with_the_weights_of_one_that_was_not(
    server: ServerProcess,
) -> None:
    client = server.client()
    file = upload(client, supervised(8))
    straight = wait(client, create(client, file, **OPTIONS).id)
    job = create(client, file, **OPTIONS).id
    wait_for_step(client, job, 3)
    worker = locked_by(server.data_dir / "jobs" / job / "lock")
    assert client.fine_tuning.jobs.pause(job).status == "paused"
    assert client.fine_tuning.jobs.pause(job).status == "paused"
    wait_until_free(server, job)
    assert worker is not None
    with pytest.raises(ProcessLookupError):
        for _ in range(600):
            os.kill(worker, 0)
            time.sleep(0.05)
    # The device is free: another job trains, and ends before it.
    other = create(client, file, n_epochs=1, batch_size=8)
    assert wait(client, other.id).status == "succeeded"
    server.kill()
    server.start()
    client = server.client()
    assert client.fine_tuning.jobs.retrieve(job).status == "paused"
    assert any(text.startswith("The worker has ended after step") for text in messages(client, job))
    assert client.fine_tuning.jobs.resume(job).status in ("queued", "running")
    done = wait(client, job)
    assert done.status == "succeeded", (done.error, messages(client, job))
    said = messages(client, job)
    assert "Fine-tuning job paused" in said and "Fine-tuning job resumed" in said
    assert any(text.startswith("Fine-tuning job started, from step") for text in said)
    assert weights_of(server, job) == weights_of(server, straight.id)
    assert sum(text.startswith("Step ") for text in said) == 16
    for ask in (client.fine_tuning.jobs.pause, client.fine_tuning.jobs.resume):
        with pytest.raises(openai.BadRequestError, match="has ended") as caught:
            ask(job)
        assert caught.value.code == "job_already_completed"


@pytest.mark.slow
def test_jobs_are_paused_in_the_queue_resumed_at_once_and_cancelled(server: ServerProcess) -> None:
    client = server.client()
    file = upload(client, supervised(8))
    running, waiting = create(client, file, **OPTIONS).id, create(client, file, **OPTIONS).id
    jobs = client.fine_tuning.jobs
    assert jobs.pause(waiting).status == "paused"
    wait_for_step(client, running, 1)
    jobs.pause(running)
    assert jobs.resume(running).status == "queued"  # Its worker may not have noticed yet.
    assert wait(client, running).status == "succeeded", messages(client, running)
    assert jobs.retrieve(waiting).status == "paused"
    assert jobs.cancel(waiting).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        jobs.pause("ftjob-000000000000000000000000")


@pytest.mark.slow
def test_a_model_that_a_job_still_needs_cannot_be_deleted(server: ServerProcess) -> None:
    client = server.client()
    file = upload(client, supervised(2))
    first = wait(client, create(client, file, n_epochs=1).id)
    assert first.fine_tuned_model is not None
    second = create(client, file, n_epochs=1, request={"model": first.fine_tuned_model})
    client.fine_tuning.jobs.pause(second.id)
    with pytest.raises(openai.ConflictError, match=second.id) as caught:
        client.models.delete(first.fine_tuned_model)
    assert caught.value.code == "model_in_use"
    client.fine_tuning.jobs.cancel(second.id)
    assert client.models.delete(first.fine_tuned_model).deleted
