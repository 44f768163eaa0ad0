"""ART's trainings when somebody is killed or hangs up: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.art_client import lines_of, model_of, pair, train_body
from tests.server.data import ASK
from tests.server.process import ServerProcess
from tests.server.test_crash import worker_of

MODEL = model_of()


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, tmp_path) as running:
        post(running, "/register", MODEL)
        yield running


def post(server: ServerProcess, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.address}{path}", json=body, timeout=120)


def step_of(server: ServerProcess) -> int:
    return int(post(server, "/_get_step", MODEL).json())


def jobs_of(server: ServerProcess) -> list[Any]:
    """The trainings of the model, the newest first."""
    found = server.http(timeout=60).get("/v1/fine_tuning/jobs", params={"metadata[art_model]": "agent"})
    return list(found.json()["data"])


def begun(server: ServerProcess) -> str:
    """The name of a training, once it is under way."""
    for _ in range(600):
        if found := jobs_of(server):
            return str(found[0]["id"])
        time.sleep(0.05)
    raise AssertionError("no job")


def test_a_killed_server_and_worker_lose_no_training_and_double_none(server: ServerProcess) -> None:
    body = train_body(MODEL, pair())
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(post, server, "/_train_model", body)
        job = begun(server)
        worker = worker_of(server, job)
        server.kill()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            asked.result()
    server.start()
    # The same request again follows the training that the first one began.
    (line,) = lines_of(post(server, "/_train_model", body))
    assert line["num_gradient_steps"] == 1
    assert step_of(server) == 1
    assert [one["id"] for one in jobs_of(server)] == [job]
    server.client().chat.completions.create(model="agent@1", messages=[ASK], max_tokens=1)  # type: ignore[list-item]


def sent(server: ServerProcess, body: Any) -> socket.socket:
    """The connection of a train request, which can be closed before its answer comes."""
    content = json.dumps(body).encode()
    host, port = server.address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST /_train_model HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_whoever_hangs_up_cancels_and_others_wait(server: ServerProcess) -> None:
    with sent(server, train_body(MODEL, pair())):
        job = begun(server)
        other = post(server, "/_train_model", train_body(MODEL, pair(0.0, 1.0)))
        assert other.status_code == 409
        assert f"is being trained by job {job}" in other.json()["error"]["message"]
    for _ in range(600):
        if jobs_of(server)[0]["status"] == "cancelled":
            break
        time.sleep(0.05)
    assert [one["status"] for one in jobs_of(server)] == ["cancelled"]
    assert step_of(server) == 0
    assert lines_of(post(server, "/_train_model", train_body(MODEL, pair())))
    assert [one["status"] for one in jobs_of(server)] == ["succeeded", "cancelled"]
    assert step_of(server) == 1


def test_a_training_that_fails_says_why_and_is_no_step(server: ServerProcess) -> None:
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(post, server, "/_train_model", train_body(MODEL, pair()))
        job = begun(server)
        # Its data are gone before its worker has read them.
        (file,) = [one["id"] for one in server.http(timeout=60).get("/v1/files").json()["data"]]
        server.http(timeout=60).delete(f"/v1/files/{file}").raise_for_status()
        answer = asked.result()
    assert answer.status_code == 400
    assert f"job {job} failed" in answer.json()["error"]["message"]
    assert step_of(server) == 0
    assert lines_of(post(server, "/_train_model", train_body(MODEL, pair())))
    assert step_of(server) == 1
