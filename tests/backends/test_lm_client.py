"""The client of a language-model server: waiting, versions, the engine, and errors with names."""

import socket

import httpx
import pytest

from etude.backends.lm_server import (
    BadResponseError,
    ClientTimeoutError,
    LanguageModelClient,
    ServerVersionError,
)
from etude.wire.retries import RetryPolicy
from tests.backends.lm_stand_in import LmStandIn
from tests.remote_faults import FAULTS, FaultyEndpoint


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("etude.backends.lm_server._POLL", 0.0)


@pytest.mark.parametrize("fault", ["html", "half-json", "list", "no-utf-8", "trickle", "headers"])
async def test_an_answer_that_is_none_is_asked_for_again(fault):
    async with FaultyEndpoint().serving() as endpoint:
        address = f"{endpoint.origin}/{fault}"
        is_slow = FAULTS[fault].kind == "slow"
        seconds = 0.5 if is_slow else 60
        client = LanguageModelClient(address, timeout=seconds, policy=RetryPolicy(retries=1, first_wait=0))
        kind = ClientTimeoutError if is_slow else BadResponseError
        with pytest.raises(kind, match="no answer" if is_slow else "etude server"):
            await client.get_server_version()
        assert endpoint.asked[fault] == 2
        await client.close()


async def test_a_server_of_another_major_version_is_refused_and_of_another_minor_one_warned_of(caplog):
    client = LmStandIn(version="7.0.0").language_model_client()
    with pytest.raises(ServerVersionError, match=r"is etude 7\.0\.0, and this is .* another major version"):
        await client.wait_for_ready()
    await LmStandIn(version="0.99.3").language_model_client().validate_server_version()
    assert "is etude 0.99.3" in caplog.text


@pytest.mark.parametrize("version", ["none", ""])
async def test_a_version_that_is_none_is_no_server_of_ours(version):
    with pytest.raises(BadResponseError, match=f"version is {version!r}"):
        await LmStandIn(version=version).language_model_client().validate_server_version()


async def test_the_engine_is_put_away_and_brought_back():
    server = LmStandIn(slow=3)
    client = server.language_model_client()
    await client.stop_engine()
    await client.stop_engine()
    assert (await client.get_engine_status()).status == "stopped"
    status = await client.start_engine(timeout=60)
    assert (status.status, status.engine) == ("running", "embedded")
    assert server.engine == ["stop", "stop", "start"]


async def test_an_engine_that_does_not_come_back_in_time_says_what_it_does():
    server = LmStandIn(slow=1000)
    with pytest.raises(ClientTimeoutError, match=r"engine at .* is starting after 0 s"):
        await server.language_model_client().start_engine(timeout=0)


async def test_a_wrong_key_is_told_and_not_repeated():
    client = LmStandIn().language_model_client("sk-wrong")
    with pytest.raises(BadResponseError, match=r"answered HTTP 401: Incorrect API key") as raised:
        await client.stop_engine()
    assert "sk-wrong" not in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(200, json={"other": 1}), r"version: Field required.*etude server"),
        (httpx.Response(404, json={"detail": "Not Found"}), "answered HTTP 404: Not Found"),
        (httpx.Response(500, text=""), "answered HTTP 500$"),
        (httpx.Response(400, json={"error": {"message": "no, sk-key"}}), r"answered HTTP 400: no, \*\*\*"),
    ],
)
async def test_what_is_no_answer_of_ours_is_an_error_with_a_name(answer, message):
    transport = httpx.MockTransport(lambda request: answer)
    soon = RetryPolicy(first_wait=0.001)
    client = LanguageModelClient("http://x.invalid", "sk-key", transport=transport, policy=soon)
    with pytest.raises(BadResponseError, match=message):
        await client.get_server_version()


async def test_what_fails_for_a_while_is_asked_again():
    server = LmStandIn()
    server.faults["GET /version"] = ["lost", 503, 429]
    server.faults["POST /engine/stop"] = ["lost", 502]
    client = server.language_model_client()
    assert await client.get_server_version() == server.version
    await client.stop_engine()
    assert (server.count("GET /version"), server.count("POST /engine/stop")) == (4, 3)


async def test_a_server_that_takes_connections_and_never_answers_is_given_up_in_time(monkeypatch, caplog):
    monkeypatch.setattr("etude.backends.lm_server._POLL", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = LanguageModelClient(url, timeout=3600.0)
        with pytest.raises(TimeoutError, match=r"after 0.2 s \(GET .*: no answer .*\); .*etude serve"):
            await client.wait_for_ready(timeout=0.2)
        await client.close()
    (told,) = caplog.messages
    assert f"at {url}: GET {url}/health: no answer" in told
