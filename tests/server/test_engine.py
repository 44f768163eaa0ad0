"""A server's start, its engine, its jobs in one process and several, and what workers are forked from."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from typer.testing import CliRunner

from etude.backends.job_worker import JobFolder
from etude.cli.app import app
from etude.core.errors import RequestError
from etude.server.settings import server_settings, training_processes
from tests.server.data import create, messages, supervised_rows, upload, wait, wait_for_step
from tests.server.process import ServerProcess
from tests.server.test_crash import LONG, check_whole, find_worker
from tests.support import is_alive, wait_until

ASK = [{"role": "user", "content": "?"}]
ASKS = {"metadata": {"etude_free_engine": "true"}}


def test_requests_wait_for_an_engine_that_was_put_away(server: ServerProcess) -> None:
    with server.http(timeout=60) as http:
        assert http.get("/engine/status").json()["status"] == "running"
        assert http.post("/engine/stop").json() == http.post("/engine/stop").json() | {"status": "stopped"}
        assert http.get("/engine/status").json()["models"] == []
        answers: list[object] = []
        waiting = threading.Thread(
            target=lambda: answers.append(
                server.client().chat.completions.create(model="tiny", messages=ASK, max_tokens=2)
            )
        )
        waiting.start()
        started = http.post("/engine/start").json()
        assert started["status"] == "running" and started["models"] == ["tiny"]
        waiting.join(timeout=60)
        assert len(answers) == 1


@pytest.mark.slow
def test_a_single_job_can_ask_for_the_engines_place_also_of_the_next_server(
    model: Path, tmp_path: Path
) -> None:
    with ServerProcess(model, tmp_path) as running:
        client = running.client()
        job = create(client, upload(client, supervised_rows(8)), request=ASKS, n_epochs=60, batch_size=2)
        wait_for_step(client, job.id, 1)
        with running.http() as http:
            status = http.get("/engine/status").json()
            assert (status["status"], status["away_for_jobs"]) == ("stopped", True)
        running.kill()
        running.start()
        client = running.client()
        assert wait(client, job.id).status == "succeeded"
        # A request waits until the engine is back, which takes no client to see to.
        client.chat.completions.create(model="tiny", messages=ASK, max_tokens=1)
        with running.http() as http:
            assert not http.get("/engine/status").json()["away_for_jobs"]
        plain = create(client, upload(client, supervised_rows(8)), n_epochs=2, batch_size=2)
        wait_for_step(client, plain.id, 1)
        with running.http() as http:
            assert http.get("/engine/status").json()["status"] == "running"
        wait(client, plain.id)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["./nowhere"], "model './nowhere': "),
        (["./nowhere", "--api-key-env", "NO_SUCH_KEY"], "variable NO_SUCH_KEY "),
        (["./nowhere", "--host", "203.0.113.1"], "there is no API key"),
        (["./nowhere", "--dtype", "int3"], "--dtype"),
        (["./nowhere", "--vllm-arg=--enforce-eager"], "needs --engine vllm"),
        (["./nowhere", "--samplers", "2", "--engine", "vllm"], "name one: --on auto"),
    ],
)
def test_a_server_that_cannot_be_is_refused_with_what_to_do(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["serve", *arguments, "--port", "0"])
    assert done.exit_code == 2
    assert told in done.stderr


SHORT = {"n_epochs": 1, "batch_size": 8, "learning_rate": 0.001, "lora_rank": 4}


def children(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.pid).children()


def find_fork_server(server: ServerProcess) -> psutil.Process:
    (found,) = [each for each in children(server) if "forkserver" in " ".join(each.cmdline())]
    return found


def train_shortly(client: openai.OpenAI) -> None:
    assert wait(client, create(client, upload(client, supervised_rows(8)), **SHORT).id).status == "succeeded"


@pytest.mark.slow
def test_the_next_job_is_forked_from_the_process_that_is_ready(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path, key="a-secret-key") as server:
        client = server.client()
        train_shortly(client)
        ready = find_fork_server(server)
        job = create(client, upload(client, supervised_rows(8)), **LONG).id
        worker = find_worker(server, job)
        assert psutil.Process(worker).ppid() == ready.pid
        assert os.getsid(worker) == worker
        assert b"a-secret-key" not in Path(f"/proc/{worker}/environ").read_bytes()
        output = Path(f"/proc/{worker}/fd/1")
        assert not output.exists() or output.resolve() == (tmp_path / "jobs" / job / "worker.log").resolve()

        # One that is killed costs its job the steps since a checkpoint, and the next job gets another.
        ready.kill()
        assert wait(client, job).status == "succeeded"
        train_shortly(client)
        last = find_fork_server(server)
    wait_until(lambda: not is_alive(last.pid), 200)


def list_ranks(server: ServerProcess, job: str) -> list[int]:
    """The processes that train a job, the one that writes first."""
    for _ in range(6000):
        found = JobFolder(server.data_dir / "jobs" / job).holders()
        if len(found) == 2 and all(found):
            return found
        time.sleep(0.05)
    raise AssertionError("no two processes")


@pytest.mark.slow
@pytest.mark.parametrize(("options", "rank", "killed"), [((), 4, 1), (("--shard-training",), 0, 0)])
def test_two_processes_train_a_job_and_survive_kill_9(
    model: Path, tmp_path: Path, options: Sequence[str], rank: int, killed: int
) -> None:
    two = ("--checkpoint-steps", "5", "--training-processes", "2", "--device", "cpu")
    with ServerProcess(model, tmp_path, *two, *options) as running:
        kill_a_rank(running, killed, LONG | {"lora_rank": rank})


def kill_a_rank(running: ServerProcess, rank: int, options: dict[str, Any]) -> None:
    """Kill a process of a job under way, which is made whole from its last checkpoint."""
    client = running.client()
    request = {"validation_file": upload(client, supervised_rows(3)), "seed": 1}
    job = create(client, upload(client, supervised_rows(8)), request=request, **options).id
    wait_for_step(client, job, 8)
    os.kill(list_ranks(running, job)[rank], signal.SIGKILL)
    check_whole(client, job)
    told = messages(client, job)
    assert any(f"process {rank} was killed" in text and "continues from step" in text for text in told)
    assert any("started, from step" in text for text in told)


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
    with pytest.raises(RequestError, match=r"--training-processes 5 .*: --device auto is 4 GPUs"):
        processes("auto", 5)
    with pytest.raises(RequestError, match=r"--training-processes 2 .* --device cuda:1 "):
        processes("cuda:1", 2)
