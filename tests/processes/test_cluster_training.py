"""Jobs of a server that processes on several nodes train: the same models, whichever process is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from etude.models.policy import WEIGHTS_FILE
from etude.models.weights import load_tensors
from etude.server.jobs import job_folder
from tests.learner.test_team import assert_near
from tests.processes.cluster_jobs import members
from tests.server.data import create, messages, supervised, upload, wait, wait_for_step
from tests.server.process import ServerProcess
from tests.server.test_crash import LONG, check_whole
from tests.server.test_engine import losses, wait_for_end

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


@dataclass(frozen=True)
class Trained:
    """The losses that a job has told, and the weights that it has made."""

    losses: list[float]
    weights: dict[str, Any]
    """Those of its LoRA weights that begin at 0."""


def trained(server: ServerProcess, job: str) -> Trained:
    tensors = load_tensors(server.data_dir / "models" / job / WEIGHTS_FILE)
    weights = {name: tensor for name, tensor in tensors.items() if "lora_B" in name}
    return Trained(losses(server.client(), job), weights)


@pytest.fixture(scope="module")
def of_one_process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The job that one process on the server's machine trains."""
    with ServerProcess(model, tmp_path_factory.mktemp("alone"), *OPTIONS) as alone:
        job = long_job(alone)
        assert wait(alone.client(), job).status == "succeeded"
        return trained(alone, job)


def long_job(server: ServerProcess, **options: Any) -> str:
    client = server.client()
    request = {"validation_file": upload(client, supervised(3)), "seed": 1}
    return create(client, upload(client, supervised(8)), request=request, **LONG | options).id


def check_equal(server: ServerProcess, job: str, expected: Trained) -> list[str]:
    """The job's model is whole, and its losses and weights are those of one process; its events."""
    check_whole(server.client(), job)
    check_trained(server, job, expected)
    return messages(server.client(), job)


def check_trained(server: ServerProcess, job: str, expected: Trained) -> None:
    found = trained(server, job)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3, abs=1e-5)
    start = {name: 0 * tensor for name, tensor in expected.weights.items()}
    assert_near(found.weights, expected.weights, start)


def test_two_nodes_train_what_one_process_does_and_survive_kill_9(
    two: ServerProcess, of_one_process: Trained
) -> None:
    job = long_job(two)
    wait_for_step(two.client(), job, 8)
    os.kill(list_processes(two, job)[1], signal.SIGKILL)
    events = check_equal(two, job, of_one_process)
    assert any("process 1 was killed" in text and "continues from step" in text for text in events)
    assert any(text.startswith("Fine-tuning job started, from step") for text in events)


def the_server(server: ServerProcess, job: str) -> None:
    server.kill()
    server.start()


def nothing_but_stop_the_server(server: ServerProcess, job: str) -> None:
    parts = list_processes(server, job)
    server.stop()
    wait_for_end(parts)
    server.start()


@pytest.mark.parametrize("kill", [the_server, nothing_but_stop_the_server])
def test_whatever_is_killed_nothing_is_lost(
    two: ServerProcess, of_one_process: Trained, kill: Callable[[ServerProcess, str], None]
) -> None:
    job = long_job(two)
    wait_for_step(two.client(), job, 8)
    kill(two, job)
    check_equal(two, job, of_one_process)


def test_a_cancelled_job_ends_its_processes(two: ServerProcess) -> None:
    client, job = two.client(), long_job(two)
    wait_for_step(client, job, 2)
    parts = list_processes(two, job)
    client.fine_tuning.jobs.cancel(job)
    wait_for_end(parts)
    assert client.fine_tuning.jobs.retrieve(job).status == "cancelled"
