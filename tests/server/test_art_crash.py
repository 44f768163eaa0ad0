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


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Each test trains a model of its own on it; the one that kills it starts it again."""
    with ServerProcess(model, tmp_path_factory.mktemp("art-crash")) as running:
        yield running


def registered(server: ServerProcess, name: str) -> dict[str, Any]:
    model = model_of(name)
    post(server, "/register", model)
    return model


def post(server: ServerProcess, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.address}{path}", json=body, timeout=120)


def step_of(server: ServerProcess, model: dict[str, Any]) -> int:
    return int(post(server, "/_get_step", model).json())


def jobs_of(server: ServerProcess, model: dict[str, Any]) -> list[Any]:
    """The trainings of the model, the newest first."""
    query = {"metadata[art_model]": model["name"]}
    return list(server.http(timeout=60).get("/v1/fine_tuning/jobs", params=query).json()["data"])


def begun(server: ServerProcess, model: dict[str, Any]) -> Any:
    """The model's training, once it is under way."""
    for _ in range(600):
        if jobs := jobs_of(server, model):
            return jobs[0]
        time.sleep(0.05)
    raise AssertionError("no job")


@pytest.mark.slow
def test_a_killed_server_and_worker_lose_no_training_and_double_none(server: ServerProcess) -> None:
    agent = registered(server, "agent")
    body = train_body(agent, pair())
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(post, server, "/_train_model", body)
        job = begun(server, agent)["id"]
        worker = worker_of(server, job)
        server.kill()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            asked.result()
    server.start()
    # The same request again follows the training that the first one began.
    (line,) = lines_of(post(server, "/_train_model", body))
    assert line["num_gradient_steps"] == 1
    assert step_of(server, agent) == 1
    assert [each["id"] for each in jobs_of(server, agent)] == [job]
    server.client().chat.completions.create(model="agent@1", messages=[ASK], max_tokens=1)  # type: ignore[list-item]


def sent(server: ServerProcess, body: Any) -> socket.socket:
    """The connection of a train request, which can be closed before its answer comes."""
    content = json.dumps(body).encode()
    host, port = server.address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST /_train_model HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.slow
def test_whoever_hangs_up_cancels_and_others_wait(server: ServerProcess) -> None:
    waiting = registered(server, "waiting")
    with sent(server, train_body(waiting, pair())):
        job = begun(server, waiting)["id"]
        other = post(server, "/_train_model", train_body(waiting, pair(0.0, 1.0)))
        assert other.status_code == 409
        assert f"is being trained by job {job}" in other.json()["error"]["message"]
    for _ in range(600):
        if jobs_of(server, waiting)[0]["status"] == "cancelled":
            break
        time.sleep(0.05)
    assert [each["status"] for each in jobs_of(server, waiting)] == ["cancelled"]
    assert step_of(server, waiting) == 0
    assert lines_of(post(server, "/_train_model", train_body(waiting, pair())))
    assert [each["status"] for each in jobs_of(server, waiting)] == ["succeeded", "cancelled"]
    assert step_of(server, waiting) == 1


@pytest.mark.slow
def test_a_training_that_fails_says_why_and_is_no_step(server: ServerProcess) -> None:
    failing = registered(server, "failing")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(post, server, "/_train_model", train_body(failing, pair()))
        job = begun(server, failing)
        # Its data are gone before its worker has read them.
        server.http(timeout=60).delete(f"/v1/files/{job['training_file']}").raise_for_status()
        answer = asked.result()
    assert answer.status_code == 400
    assert f"job {job['id']} failed" in answer.json()["error"]["message"]
    assert step_of(server, failing) == 0
    assert lines_of(post(server, "/_train_model", train_body(failing, pair())))
    assert step_of(server, failing) == 1
