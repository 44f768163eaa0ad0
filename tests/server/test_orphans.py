"""A server that is killed leaves no process behind, whenever that is."""

from __future__ import annotations

import os
import shlex
import signal
import time
import uuid
from pathlib import Path

import pytest

from tests.forked import Forked, address
from tests.server.data import create, supervised, upload
from tests.server.process import ServerProcess
from tests.vllm import STAND_IN

MARK = "ETUDE_TEST_MARK"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A value in the environment of all processes that the test starts."""
    address()  # The process that others are forked from is not of the test.
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


def marked(mark: str, *, but: int) -> set[int]:
    """The processes with the mark."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, state = (folder / "environ").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and state.rpartition(")")[2].split()[0] != "Z":
            found.add(int(folder.name))
    return found - {but, os.getpid()}


def until(holds, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)


@pytest.mark.parametrize(
    "later", [0.0, *(pytest.param(later, marks=pytest.mark.slow) for later in (0.02, 0.5))]
)
def test_vllm_ends_with_a_server_that_is_killed_while_it_starts(
    wide: Path, tmp_path: Path, mark: str, later: float
) -> None:
    command = ["serve", str(wide), "--port", "0", "--data-dir", str(tmp_path), "--engine", "vllm"]
    options = ["--vllm-command", shlex.join(STAND_IN), "--vllm-arg=--slow", "--device", "cpu"]
    server = Forked([*command, *options], Path.cwd(), dict(os.environ), errors=tmp_path / "stderr.log")
    until(lambda: marked(mark, but=server.pid))
    time.sleep(later)
    server.send_signal(signal.SIGKILL)
    server.wait(timeout=60)
    server.stdout.close()
    until(lambda: not marked(mark, but=server.pid))


def test_a_worker_ends_with_a_server_that_is_killed_while_it_starts(
    model: Path, tmp_path: Path, mark: str
) -> None:
    server = ServerProcess(model, tmp_path)
    server.start()
    client, pid = server.client(), server.pid
    create(client, upload(client, supervised(8)), n_epochs=1000, batch_size=1, lora_rank=4)
    until(lambda: len(marked(mark, but=pid)) > 1)  # The nursery and its worker.
    server.kill()
    until(lambda: not marked(mark, but=pid))


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
