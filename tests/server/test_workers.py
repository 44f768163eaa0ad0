"""The worker that is kept ready."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.server.data import create, messages, supervised, upload, wait
from tests.server.process import ServerProcess
from tests.server.test_crash import LONG, worker_of

SHORT = {"n_epochs": 1, "batch_size": 8, "learning_rate": 0.001, "lora_rank": 4}


def children(server: ServerProcess) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def is_gone(pid: int) -> bool:
    """Whether the process has ended, its parent's interest in it aside."""
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return told.stdout.strip()[:1] in ("", "Z")


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to that")


def spare_after_a_job(server: ServerProcess) -> int:
    client = server.client()
    assert wait(client, create(client, upload(client, supervised(8)), **SHORT).id).status == "succeeded"
    eventually(lambda: len(children(server)) == 1)  # The job's own process takes a moment to end.
    (spare,) = children(server)
    return spare


def test_the_workers_log_from_the_level_that_the_server_was_given(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path, "--log-level", "debug") as server:
        client = server.client()
        job = wait(client, create(client, upload(client, supervised(8)), **SHORT).id)
        assert job.status == "succeeded"
        lines = (tmp_path / "jobs" / job.id / "worker.log").read_text()
        assert " DEBUG etude.server.worker: order: " in lines


def test_the_next_job_gets_the_process_that_is_ready(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path) as server:
        client, spare = server.client(), spare_after_a_job(server)
        job = create(client, upload(client, supervised(8)), **LONG).id
        assert worker_of(server, job) == spare
        (other,) = {*children(server)} - {spare}
        output = Path(f"/proc/{spare}/fd/1")
        assert not output.exists() or output.resolve() == (tmp_path / "jobs" / job / "worker.log").resolve()
        assert wait(client, job).status == "succeeded"

        # One that was killed costs its job nothing.
        os.kill(other, signal.SIGKILL)
        eventually(lambda: other not in children(server))
        last = spare_after_a_job(server)
        told = [text for one in client.fine_tuning.jobs.list() for text in messages(client, one.id)]
        assert not any("ended early" in text for text in told)
    assert is_gone(last)


def test_the_process_that_is_ready_ends_with_a_server_that_is_killed(model: Path, tmp_path: Path) -> None:
    server = ServerProcess(model, tmp_path)
    server.start()
    try:
        spare = spare_after_a_job(server)
    finally:
        server.kill()
    eventually(lambda: is_gone(spare))
