"""kill -9 at random points, again and again: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import openai
import pytest

from etude.store.run_folder import locked_by
from tests.server.data import ASK, FINAL, create, messages, supervised, upload, wait
from tests.server.process import ServerProcess
from tests.vllm import commands, vllms_of

KILLS = 50
PARTS = ("server", "worker", "engine")
OPTIONS = {"n_epochs": 10, "batch_size": 1, "learning_rate": 0.001, "lora_rank": 4}
STEPS = 80


@pytest.mark.slow
@commands
def test_fifty_kills(wide: Path, tmp_path: Path, command: str) -> None:
    choose = random.Random(1)
    engine = ("--engine", "vllm", "--vllm-command", command, "--engine-wait", "300")
    server = ServerProcess(wide, tmp_path, *engine, "--checkpoint-steps", "3", "--running-jobs", "2")
    server.start()
    file = upload(server.client(), supervised(8))
    jobs: list[str] = []
    try:
        for _ in range(KILLS):
            top_up(server.client(), jobs, file)
            time.sleep(choose.uniform(0, 8))
            hit = choose.sample(PARTS, choose.choice([1, 1, 2, 3]))
            kill(server, hit, {"worker": workers(tmp_path, jobs), "engine": vllms_of(server.pid)})
        check(server.client(timeout=300), jobs, file)
    finally:
        server.stop()


def top_up(client: openai.OpenAI, jobs: list[str], file: str) -> None:
    """There is always something to kill: two jobs that run, and one that waits."""
    open_jobs = [job for job in jobs if client.fine_tuning.jobs.retrieve(job).status not in FINAL]
    for _ in range(3 - len(open_jobs)):
        jobs.append(numbered(client, len(jobs), file))


def numbered(client: openai.OpenAI, number: int, file: str) -> str:
    marked = {"metadata": {"idempotency_key": str(number)}}
    return create(client, file, request=marked, **OPTIONS).id


def workers(folder: Path, jobs: Sequence[str]) -> list[int]:
    return [pid for job in jobs if (pid := locked_by(folder / "jobs" / job / "lock"))]


def kill(server: ServerProcess, hit: Sequence[str], pids: Mapping[str, Sequence[int]]) -> None:
    for part in hit:
        if part == "server":
            server.kill()
        for pid in pids.get(part, ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if "server" in hit:
        server.start()


def check(client: openai.OpenAI, jobs: Sequence[str], file: str) -> None:
    for number, job in enumerate(jobs):
        done = wait(client, job, seconds=600)
        if done.error is not None and done.error.code == "worker_crashed":
            continue  # Three kills without a checkpoint between them: given up, with the reason.
        assert done.status == "succeeded", (done.error, messages(client, job))
        assert numbered(client, number, file) == job
        events = client.fine_tuning.jobs.list_events(job, limit=100)
        steps = [event.data["step"] for event in events if event.type == "metrics"]
        assert sorted(steps) == list(range(1, STEPS + 1))
        assert len(client.files.content(done.result_files[0]).text.splitlines()) == STEPS + 1
        client.chat.completions.create(model=str(done.fine_tuned_model), messages=[ASK], max_tokens=1)
    names = [model.id for model in client.models.list()]
    models = [name for name in names if name.startswith("ft:") and "ckpt" not in name]
    succeeded = [job for job in jobs if client.fine_tuning.jobs.retrieve(job).status == "succeeded"]
    assert len(models) == len(set(models)) == len(succeeded) > len(jobs) / 2
    assert sorted(job.id for job in client.fine_tuning.jobs.list(limit=100)) == sorted(jobs)
