import signal
from pathlib import Path

import openai
import pytest

from tests.server.process import ServerProcess
from tests.support import wait_until

KEY = "sk-a-long-secret"
ASK = [{"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def locked_server(model: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("locked")
    with ServerProcess(model, folder, "--name", "policy", key=KEY) as running:
        yield running


@pytest.mark.parametrize("key", ["x", "wrong", KEY[:-1], KEY + "x"])
def test_a_wrong_key_is_refused_everywhere(locked_server: ServerProcess, key: str) -> None:
    with locked_server.http() as http:
        for path in ("/v1/models", "/v1/files", "/metrics", "/engine/status", "/nowhere"):
            answer = http.get(path, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/version", "/docs", "/openapi.json"):  # They tell of nobody.
            assert http.get(path, headers={"authorization": "Basic"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        locked_server.client(api_key=key).models.list()


def test_a_web_page_cannot_reach_a_server_without_a_key_by_another_name(server: ServerProcess) -> None:
    with server.http() as http:
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert http.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_a_web_page_of_another_place_cannot_use_a_server_without_a_key(
    server: ServerProcess, kind: str
) -> None:
    own = server.address
    with server.http(headers={"content-type": kind}) as http:
        for path in ("/engine/stop", "/v1/files", "/_log", "/v1/chat/completions"):
            for origin in ("http://evil.example", "null", "http://localhost:3000", f"{own}0"):
                answer = http.post(path, headers={"origin": origin})
                assert answer.status_code == 403 and answer.json()["error"]["code"] == "wrong_origin"
            assert http.post(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403
        # Pages of the server itself, as /docs, may.
        assert http.get("/v1/models", headers={"origin": own}).status_code == 200
        assert "access-control-allow-origin" not in http.get("/v1/models", headers={"origin": own}).headers
        assert http.get("/engine/status").json()["status"] == "running"


def test_a_request_that_is_too_large_is_refused(server: ServerProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
    assert b" 413 " in server.raw(head)
    with server.http() as http:

        def endless():
            for _ in range(40):
                yield b" " * 2**20

        told = http.post(
            "/v1/chat/completions", content=endless(), headers={"content-type": "application/json"}
        )
        assert told.status_code == 413


def test_metrics_count_tokens(server: ServerProcess) -> None:
    server.client().chat.completions.create(model="tiny", messages=ASK, max_tokens=2)
    with server.http() as http:
        text = http.get("/metrics").text
    assert "etude_sampled_tokens_total" in text and "etude_sequences 0.0" in text


def test_a_client_that_hangs_up_leaves_no_work_behind(server: ServerProcess) -> None:
    stream = server.client().chat.completions.create(
        model="tiny", messages=ASK, max_tokens=100, n=8, stream=True
    )
    next(iter(stream))
    stream.close()
    with server.http() as http:
        wait_until(lambda: http.get("/engine/status").json()["sequences"] == 0)


def test_two_servers_cannot_share_a_folder(server: ServerProcess, model: Path) -> None:
    second = ServerProcess(model, server.data_dir)
    with pytest.raises(AssertionError, match=rf"{server.data_dir} .* another --data-dir"):
        second.start()


def test_requests_under_way_are_finished_when_the_server_is_stopped(locked_server: ServerProcess) -> None:
    """The last of the tests: no other has the server that it stops."""
    stream = locked_server.client().chat.completions.create(
        model="policy", messages=ASK, max_tokens=100, stream=True, seed=3
    )
    pieces = [next(iter(stream))]
    process = locked_server.terminate()
    pieces += list(stream)
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")
    assert process.wait(timeout=60) in (0, -signal.SIGTERM)
    assert KEY not in locked_server.log.read_text()
