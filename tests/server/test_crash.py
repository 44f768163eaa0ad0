"""kill -9 of server and worker, also at random points: nothing is lost or there twice, no process is left."""

import contextlib
import os
import random
import shlex
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import openai
import psutil
import pytest

from etude.store.run_folder import lock_holder
from tests.forked import Forked, address
from tests.server.data import ASK, FINAL, create, messages, supervised_rows, upload, wait, wait_for_step
from tests.server.process import ServerProcess
from tests.support import is_alive, wait_until
from tests.vllm import REAL, STAND_IN, commands, list_vllms

LONG = {"n_epochs": 8, "batch_size": 1, "learning_rate": 0.001, "lora_rank": 4}
STEPS = 64


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, tmp_path, "--checkpoint-steps", "5") as running:
        yield running


def find_worker(server: ServerProcess, job: str) -> int:
    """The process that trains a job."""
    # It loads torch first, which takes long where others have the cores.
    return wait_until(lambda: lock_holder(server.data_dir / "jobs" / job / "lock"), 120)


def check_whole(client: openai.OpenAI, job: str) -> None:
    """Every step is told once, and there is one model."""
    done = wait(client, job)
    assert done.status == "succeeded", (done.error, messages(client, job))
    steps = [
        event.data["step"]
        for event in client.fine_tuning.jobs.list_events(job, limit=100)
        if event.type == "metrics"
    ]
    assert sorted(steps) == list(range(1, STEPS + 1))
    mine = [name.id for name in client.models.list() if name.id != "tiny"]
    assert mine == [done.fine_tuned_model]
    client.chat.completions.create(model=mine[0], messages=[ASK], max_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize("end", [ServerProcess.kill, ServerProcess.stop])
def test_the_worker_of_a_server_that_ends_makes_way_and_the_next_server_goes_on(
    server: ServerProcess, end: Callable[[ServerProcess], object]
) -> None:
    client = server.client()
    file = upload(client, supervised_rows(8))
    job = create(client, file, **LONG).id
    waiting = create(client, file, n_epochs=1, batch_size=8).id
    wait_for_step(client, job, 3)
    worker = find_worker(server, job)
    end(server)
    wait_until(lambda: not is_alive(worker))
    server.start()
    client = server.client()
    check_whole(client, job)
    assert end is ServerProcess.stop or any("server was stopped" in text for text in messages(client, job))
    assert wait(client, waiting).status == "succeeded"
    # Nobody needs its checkpoints.
    wait_until(lambda: not [*(server.data_dir / "jobs" / job).glob("step-*")])


@pytest.mark.slow
def test_a_job_can_be_cancelled_at_any_time(server: ServerProcess) -> None:
    client = server.client()
    file = upload(client, supervised_rows(8))
    running, waiting = create(client, file, **LONG).id, create(client, file, **LONG).id
    assert client.fine_tuning.jobs.cancel(waiting).status == "cancelled"
    wait_for_step(client, running, 2)
    worker = find_worker(server, running)
    assert client.fine_tuning.jobs.cancel(running).status == "cancelled"
    wait_until(lambda: not is_alive(worker))
    assert client.fine_tuning.jobs.retrieve(running).status == "cancelled"
    assert "Fine-tuning job cancelled" in messages(client, running)
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.cancel(running)
    assert caught.value.code == "job_already_completed"
    assert [model.id for model in client.models.list() if model.id.endswith(running[6:18])] == []


@pytest.mark.slow
def test_a_worker_that_never_gets_anywhere_fails_its_job_with_the_reason(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path, "--checkpoint-steps", "1000") as server:
        client = server.client()
        options = LONG | {"batch_size": 1, "n_epochs": 200}
        job = create(client, upload(client, supervised_rows(200)), **options).id
        seen: set[int] = set()
        while client.fine_tuning.jobs.retrieve(job).status != "failed":
            pid = lock_holder(tmp_path / "jobs" / job / "lock")
            if pid and pid not in seen:
                seen.add(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        error = client.fine_tuning.jobs.retrieve(job).error
        assert error is not None and error.code == "worker_crashed" and "signal 9" in error.message
        assert len(seen) == 3


MARK = "ETUDE_TEST_MARK"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A value in the environment of all processes that the test starts."""
    address()  # The process that others are forked from is not of the test.
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


def with_mark(mark: str, *, but: int) -> set[int]:
    """The processes with the mark."""
    processes = psutil.process_iter(["environ"])
    found = {each.pid for each in processes if (each.info["environ"] or {}).get(MARK) == mark}
    return set(filter(is_alive, found)) - {but, os.getpid()}


@pytest.mark.parametrize(
    "later", [0.0, *(pytest.param(later, marks=pytest.mark.slow) for later in (0.02, 0.5))]
)
def test_vllm_ends_with_a_server_that_is_killed_while_it_starts(
    wide: Path, tmp_path: Path, mark: str, later: float
) -> None:
    command = ["serve", str(wide), "--port", "0", "--data-dir", str(tmp_path), "--engine", "vllm"]
    options = ["--vllm-command", shlex.join(STAND_IN), "--vllm-arg=--slow", "--device", "cpu"]
    server = Forked([*command, *options], Path.cwd(), dict(os.environ), errors=tmp_path / "stderr.log")
    wait_until(lambda: with_mark(mark, but=server.pid))
    time.sleep(later)
    server.send_signal(signal.SIGKILL)
    server.wait(timeout=60)
    server.stdout.close()
    wait_until(lambda: not with_mark(mark, but=server.pid))


@pytest.mark.slow
def test_a_worker_ends_with_a_server_that_is_killed_while_it_starts(
    model: Path, tmp_path: Path, mark: str
) -> None:
    server = ServerProcess(model, tmp_path)
    server.start()
    client, pid = server.client(), server.pid
    create(client, upload(client, supervised_rows(8)), n_epochs=1000, batch_size=1, lora_rank=4)
    # The fork server, its worker, and the tracker of both.
    wait_until(lambda: len(with_mark(mark, but=pid)) > 2)
    server.kill()
    wait_until(lambda: not with_mark(mark, but=pid))


LOADING = """
import asyncio, sys, time
from pathlib import Path
from etude.server import serve
from etude.server.backend import EmbeddedBackend
from etude.server.settings import server_settings

async def open_for_long(self):
    print("loading", flush=True)
    await asyncio.to_thread(time.sleep, 600)

EmbeddedBackend.open = open_for_long
serve.serve(server_settings(model=sys.argv[1], name="tiny", port=0, data_dir=Path(sys.argv[2])), print)
"""


def test_sigterm_ends_a_server_that_is_loading_its_model(model: Path, tmp_path: Path) -> None:
    arguments = ["-c", LOADING, str(model), str(tmp_path)]
    log = tmp_path / "stderr.log"
    server = Forked(arguments, Path.cwd(), dict(os.environ), program="python", errors=log)
    assert server.stdout.readline() == "loading\n", log.read_text()
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) in (-signal.SIGTERM, 128 + signal.SIGTERM)
    server.stdout.close()


KILLS, KILLS_OF_A_REAL_VLLM = 50, 8  # A real one takes a minute to start on a CPU.
PARTS = ("server", "worker", "engine")
OPTIONS = {"n_epochs": 10, "batch_size": 1, "learning_rate": 0.001, "lora_rank": 4}


@pytest.mark.slow
@commands
def test_many_kills(wide: Path, tmp_path: Path, command: str) -> None:
    choose = random.Random(1)
    engine = ("--engine", "vllm", "--vllm-command", command, "--engine-wait", "300")
    victim = ServerProcess(wide, tmp_path, *engine, "--checkpoint-steps", "3", "--running-jobs", "2")
    victim.start()
    file = upload(victim.client(), supervised_rows(8))
    jobs: list[str] = []
    try:
        for _ in range(KILLS_OF_A_REAL_VLLM if command == os.environ.get(REAL) else KILLS):
            top_up(victim.client(), jobs, file)
            time.sleep(choose.uniform(0, 8))
            hit = choose.sample(PARTS, choose.choice([1, 1, 2, 3]))
            kill(victim, hit, {"worker": workers(tmp_path, jobs), "engine": list_vllms(victim.pid)})
        check(victim.client(timeout=300), jobs, file)
    finally:
        victim.stop()


def top_up(client: openai.OpenAI, jobs: list[str], file: str) -> None:
    """There is always something to kill: two jobs that run, and one that waits."""
    open_jobs = [job for job in jobs if client.fine_tuning.jobs.retrieve(job).status not in FINAL]
    for _ in range(3 - len(open_jobs)):
        jobs.append(create_numbered(client, len(jobs), file))


def create_numbered(client: openai.OpenAI, number: int, file: str) -> str:
    marked = {"extra_headers": {"Idempotency-Key": str(number)}}
    return create(client, file, request=marked, **OPTIONS).id


def workers(folder: Path, jobs: Sequence[str]) -> list[int]:
    return [pid for job in jobs if (pid := lock_holder(folder / "jobs" / job / "lock"))]


def kill(victim: ServerProcess, hit: Sequence[str], pids: Mapping[str, Sequence[int]]) -> None:
    for part in hit:
        if part == "server":
            victim.kill()
        for pid in pids.get(part, ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if "server" in hit:
        victim.start()


def check(client: openai.OpenAI, jobs: Sequence[str], file: str) -> None:
    for number, job in enumerate(jobs):
        done = wait(client, job, seconds=600)
        if done.error is not None and done.error.code == "worker_crashed":
            continue  # Three kills without a checkpoint between them: given up, with the reason.
        assert done.status == "succeeded", (done.error, messages(client, job))
        assert create_numbered(client, number, file) == job
        events = client.fine_tuning.jobs.list_events(job, limit=100)
        steps = [event.data["step"] for event in events if event.type == "metrics"]
        assert sorted(steps) == list(range(1, 81))
        client.chat.completions.create(model=str(done.fine_tuned_model), messages=[ASK], max_tokens=1)
    names = [model.id for model in client.models.list()]
    models = [name for name in names if name.startswith("ft:")]
    succeeded = [job for job in jobs if client.fine_tuning.jobs.retrieve(job).status == "succeeded"]
    assert len(models) == len(set(models)) == len(succeeded) > len(jobs) / 2
    assert sorted(job.id for job in client.fine_tuning.jobs.list(limit=100)) == sorted(jobs)
