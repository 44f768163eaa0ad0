"""kill -9 at random points, again and again: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import openai
import pytest

from etude.store.lock import locked_by
from tests.server.data import ASK, create, messages, supervised, upload, wait
from tests.server.process import ServerProcess

KILLS = 50
JOBS = 4
OPTIONS = {"n_epochs": 40, "batch_size": 1, "learning_rate": 0.001, "lora_rank": 4}
STEPS = 320


@pytest.mark.slow
def test_fifty_kills(model: Path, tmp_path: Path) -> None:
    choose = random.Random(1)
    server = ServerProcess(model, tmp_path, "--checkpoint-steps", "3", "--running-jobs", "2")
    server.start()
    client = server.client()
    file = upload(client, supervised(8))
    jobs = [
        create(client, file, request={"metadata": {"idempotency_key": str(number)}}, **OPTIONS).id
        for number in range(JOBS)
    ]
    for _ in range(KILLS):
        time.sleep(choose.uniform(0, 6))
        what = choose.choice(["server", "worker", "both"])
        workers = [pid for job in jobs if (pid := locked_by(tmp_path / "jobs" / job / "lock"))]
        if what != "worker":
            server.kill()
        for pid in workers if what != "server" else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if what == "worker":
            # Three deaths without a checkpoint are the job's own fault, and fail it: let it get to one.
            time.sleep(8)
        else:
            server.start()
    client = server.client()
    try:
        check(client, jobs, file)
    finally:
        server.stop()


def check(client: openai.OpenAI, jobs: list[str], file: str) -> None:
    for number, job in enumerate(jobs):
        done = wait(client, job, seconds=600)
        assert done.status == "succeeded", (done.error, messages(client, job))
        again = create(client, file, request={"metadata": {"idempotency_key": str(number)}}, **OPTIONS)
        assert again.id == job
        events = client.fine_tuning.jobs.list_events(job, limit=100)
        steps = [event.data["step"] for event in events if event.type == "metrics"]
        assert sorted(steps) == list(range(1, STEPS + 1))
        assert len(client.files.content(done.result_files[0]).text.splitlines()) == STEPS + 1
        client.chat.completions.create(model=str(done.fine_tuned_model), messages=[ASK], max_tokens=1)
    models = [
        model.id for model in client.models.list() if model.id.startswith("ft:") and "ckpt" not in model.id
    ]
    assert len(models) == len(set(models)) == len(jobs)
    assert len({job.id for job in client.fine_tuning.jobs.list(limit=100)}) == len(jobs)
