"""Jobs that several processes train together: the same models, and the same whoever is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from etude.core.errors import RequestError
from etude.server.jobs import JobFolder
from etude.server.settings import server_settings, training_processes
from tests.server.data import create, messages, supervised, upload, wait, wait_for_step
from tests.server.process import ServerProcess
from tests.server.test_crash import LONG, check_whole


@pytest.fixture
def two(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose jobs are trained by two processes."""
    options = ("--checkpoint-steps", "5", "--training-processes", "2", "--device", "cpu")
    with ServerProcess(model, tmp_path, *options) as running:
        yield running


def ranks_of(server: ServerProcess, job: str) -> list[int]:
    """The processes that train a job, the one that writes first."""
    for _ in range(6000):
        found = JobFolder(server.data_dir, job).holders()
        if len(found) == 2 and all(found):
            return found
        time.sleep(0.05)
    raise AssertionError("no two processes")


def wait_for_end(pids: list[int], seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    for pid in pids:
        while time.monotonic() < end:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"{pid} goes on")


def losses(client: openai.OpenAI, job: str) -> list[float]:
    """Of every step, and of validation."""
    events = list(client.fine_tuning.jobs.list_events(job, limit=100))[::-1]
    names = ("train_loss", "valid_loss", "grad_norm")
    return [e.data[name] for e in events if e.type == "metrics" for name in names if name in e.data]


@pytest.mark.slow
def test_two_processes_train_what_one_does_and_survive_kill_9(
    server: ServerProcess, two: ServerProcess
) -> None:
    found = []
    for running in (server, two):
        client = running.client()
        held_out = upload(client, supervised(3))
        request = {"validation_file": held_out, "seed": 1}
        job = create(client, upload(client, supervised(8)), request=request, **LONG).id
        if running is two:
            wait_for_step(client, job, 8)
            os.kill(ranks_of(two, job)[1], signal.SIGKILL)
            check_whole(client, job)
            told = messages(client, job)
            assert any("process 1: signal 9" in text and "goes on from step" in text for text in told)
            assert any(text.startswith("Fine-tuning job started, from step") for text in told)
        assert wait(client, job).status == "succeeded"
        found.append(losses(client, job))
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_cancelled_job_ends_all_its_processes(two: ServerProcess) -> None:
    client = two.client()
    job = create(client, upload(client, supervised(8)), **LONG).id
    wait_for_step(client, job, 2)
    ranks = ranks_of(two, job)
    assert client.fine_tuning.jobs.cancel(job).status == "cancelled"
    wait_for_end(ranks)
    assert client.fine_tuning.jobs.retrieve(job).status == "cancelled"


def the_launcher(server: ServerProcess, ranks: list[int]) -> None:
    status = Path(f"/proc/{ranks[0]}/status").read_text()
    launcher = int(status.split("PPid:")[1].split()[0])
    os.kill(launcher, signal.SIGKILL)


def nothing_but_stop_the_server(server: ServerProcess, ranks: list[int]) -> None:
    server.stop()
    wait_for_end(ranks)
    server.start()


@pytest.mark.parametrize("kill", [the_launcher, nothing_but_stop_the_server])
@pytest.mark.slow
def test_whatever_is_killed_nothing_is_lost(
    two: ServerProcess, kill: Callable[[ServerProcess, list[int]], None]
) -> None:
    client = two.client()
    job = create(client, upload(client, supervised(8)), **LONG).id
    wait_for_step(client, job, 8)
    kill(two, ranks_of(two, job))
    check_whole(two.client(), job)


@pytest.mark.slow
def test_shards_of_the_weights_survive_kill_9_too(model: Path, tmp_path: Path) -> None:
    options = ("--checkpoint-steps", "5", "--training-processes", "2", "--shard-training", "--device", "cpu")
    with ServerProcess(model, tmp_path, *options) as running:
        client = running.client()
        job = create(client, upload(client, supervised(8)), **LONG | {"lora_rank": 0}).id
        wait_for_step(client, job, 8)
        os.kill(ranks_of(running, job)[0], signal.SIGKILL)
        check_whole(client, job)


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def processes(device: str, asked: int | None) -> int:
        given = {"model": "m", "name": "m", "data_dir": tmp_path, "device": device}
        return training_processes(server_settings(training_processes=asked, **given))

    for gpus in (0, 1, 4):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert processes("auto", None) == max(1, gpus)
        assert processes("cpu", None) == 1 and processes("cpu", 3) == 3
        assert processes("cuda:1", None) == 1
    assert processes("cuda", 2) == 2
    with pytest.raises(RequestError, match="--training-processes 5 is too many: --device auto is 4 GPUs"):
        processes("auto", 5)
    with pytest.raises(RequestError, match="is one device here"):
        processes("cuda:1", 2)
