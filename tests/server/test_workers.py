"""The nursery, from which workers are forked."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


def nursery_after_a_job(server: ServerProcess) -> int:
    client = server.client()
    assert wait(client, create(client, upload(client, supervised(8)), **SHORT).id).status == "succeeded"
    (nursery,) = children(server)
    return nursery


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_the_workers_log_from_the_level_that_the_server_was_given(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path, "--log-level", "debug") as server:
        client = server.client()
        job = wait(client, create(client, upload(client, supervised(8)), **SHORT).id)
        assert job.status == "succeeded"
        lines = (tmp_path / "jobs" / job.id / "worker.log").read_text()
        assert " DEBUG etude.server.worker: order: " in lines


@pytest.mark.slow
def test_the_next_job_is_forked_from_the_process_that_is_ready(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path) as server:
        client, nursery = server.client(), nursery_after_a_job(server)
        job = create(client, upload(client, supervised(8)), **LONG).id
        worker = worker_of(server, job)
        assert parent_of(worker) == nursery
        output = Path(f"/proc/{worker}/fd/1")
        assert not output.exists() or output.resolve() == (tmp_path / "jobs" / job / "worker.log").resolve()
        assert children(server) == [nursery]

        # One that is killed costs nothing: its worker goes on, and the next job gets another.
        os.kill(nursery, signal.SIGKILL)
        eventually(lambda: nursery not in children(server))
        os.kill(worker, 0)
        assert wait(client, job).status == "succeeded"
        last = nursery_after_a_job(server)
        told = [text for one in client.fine_tuning.jobs.list() for text in messages(client, one.id)]
        assert not any("ended early" in text for text in told)
    eventually(lambda: is_gone(last))


@pytest.mark.slow
def test_a_server_that_stops_before_its_worker_is_there_leaves_none(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path) as server:
        client = server.client()
        job = create(client, upload(client, supervised(8)), **LONG).id
        eventually(lambda: bool(children(server)))
        (nursery,) = children(server)
    eventually(lambda: is_gone(nursery))
    with ServerProcess(model, tmp_path) as server:
        assert wait(server.client(), job).status == "succeeded"
