"""Jobs of a server that processes on several nodes train: a whole model, though one of them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.server.jobs import job_folder
from tests.processes.cluster_jobs import members
from tests.server.data import create, messages, supervised, upload, wait_for_step
from tests.server.process import ServerProcess
from tests.server.test_crash import LONG, check_whole

pytestmark = pytest.mark.cluster

OPTIONS = ("--checkpoint-steps", "5", "--device", "cpu")


@pytest.fixture
def two(cluster: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose jobs are trained by two processes, each on a node of its own."""
    on = ("--on", cluster.address, "--training-processes", "2")
    with ServerProcess(model, tmp_path_factory.mktemp("two"), *OPTIONS, *on) as running:
        yield running


def list_processes(server: ServerProcess, job: str) -> list[int]:
    """The processes that train a job, the one that writes first."""
    return members(job_folder(server.data_dir, job).path, 2)


def test_two_nodes_train_a_whole_model_and_survive_kill_9(two: ServerProcess) -> None:
    """That they learn what one process does is in `test_local_learners.py`."""
    client = two.client()
    request = {"validation_file": upload(client, supervised(3)), "seed": 1}
    job = create(client, upload(client, supervised(8)), request=request, **LONG).id
    wait_for_step(client, job, 8)
    os.kill(list_processes(two, job)[1], signal.SIGKILL)
    check_whole(client, job)
    events = messages(client, job)
    assert any("process 1 was killed" in text and "continues from step" in text for text in events)
    assert any(text.startswith("Fine-tuning job started, from step") for text in events)
