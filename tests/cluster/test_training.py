"""Jobs of a server that processes on several nodes train: the same models, and the same whoever is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.server.jobs import JobFolder
from etude.store.lock import locked_by
from tests.server.data import create, messages, supervised, upload, wait, wait_for_step
from tests.server.process import ServerProcess
from tests.server.test_crash import LONG, check_whole
from tests.server.test_processes import losses

pytestmark = pytest.mark.cluster

OPTIONS = ("--checkpoint-steps", "5", "--device", "cpu")


@pytest.fixture
def two(cluster: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose jobs are trained by two processes, each on a node of its own."""
    on = ("--on", cluster.address, "--training-processes", "2")
    with ServerProcess(model, tmp_path_factory.mktemp("two"), *OPTIONS, *on) as running:
        yield running


def parts_of(server: ServerProcess, job: str) -> list[int]:
    """The processes that train a job, the one that writes first."""
    folder = JobFolder(server.data_dir, job).path
    for _ in range(2000):
        pids = [locked_by(folder / name) for name in ("leader", "member-1")]
        if all(pids):
            return [pid for pid in pids if pid]
        time.sleep(0.05)
    raise AssertionError("no two processes")


def test_two_nodes_train_what_one_process_does_and_survive_kill_9(
    two: ServerProcess, model: Path, tmp_path: Path
) -> None:
    metrics = []
    with ServerProcess(model, tmp_path, *OPTIONS) as alone:
        for server in (alone, two):
            client = server.client()
            request = {"validation_file": upload(client, supervised(3)), "seed": 1}
            job = create(client, upload(client, supervised(8)), request=request, **LONG).id
            if server is two:
                wait_for_step(client, job, 8)
                os.kill(parts_of(two, job)[1], signal.SIGKILL)
                check_whole(client, job)
                events = messages(client, job)
                assert any(
                    "process 1: it was killed" in text and "goes on from step" in text for text in events
                )
                assert any(text.startswith("Fine-tuning job started, from step") for text in events)
            assert wait(client, job).status == "succeeded"
            metrics.append(losses(client, job))
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-3, abs=1e-5)
