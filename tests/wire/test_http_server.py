"""The rules of all HTTP: servers over real sockets, and the one policy of retries."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from etude.wire.http_server import BackgroundServer, RequestChecks, is_key, listen, server_config
from etude.wire.retries import (
    Retryable,
    RetryPolicy,
    count_retries,
    is_worth_retrying,
    retry_after,
    with_retries,
)

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


async def counting(scope: Scope, receive: Receive, send: Send) -> None:
    """Says how many bytes came; fails at `/fail`."""
    if scope["path"] == "/fail":
        raise RuntimeError("broken\nin two")
    await JSONResponse({"bytes": len(await Request(scope, receive).body())})(scope, receive, send)


@asynccontextmanager
async def serve(max_body: int = 2**20) -> AsyncIterator[int]:
    listening = listen("127.0.0.1", 0)
    server = BackgroundServer(RequestChecks(counting, max_body=lambda path: max_body), listening)
    yield listening.getsockname()[1]
    await server.close()


async def connect(port: int, text: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    return reader, writer


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of an answer."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode().lower()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length"))
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def test_a_refusal_can_be_read_while_the_body_is_still_being_sent() -> None:
    async with serve(max_body=1024) as port:
        for length in (10**11, 40 * 2**20):
            reader, writer = await connect(port, POST % (b"", length))
            for _ in range(40):
                writer.write(b" " * 2**20)
                await writer.drain()
            status, body = await read_answer(reader)
            assert status == 413 and body["error"]["code"] == "request_too_large"
            assert "1024 bytes" in body["error"]["message"]
            writer.close()
        # And where the length is not said.
        reader, writer = await connect(
            port, b"POST / HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write((b"%x\r\n" % 2048) + b"x" * 2048 + b"\r\n")
        assert (await read_answer(reader))[0] == 413
        writer.close()


async def test_a_connection_beyond_the_limit_is_told_so_and_the_others_go_on() -> None:
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(server_config(RequestChecks(counting), connections=3, log_level="critical"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    port = listening.getsockname()[1]
    kept = [await connect(port, GET % b"") for _ in range(2)]
    assert [await read_answer(reader) for reader, _ in kept] == [(200, {"bytes": 0})] * 2
    reader, refused = await connect(port, GET % b"")
    assert b" 503 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    refused.close()
    for _, writer in kept:
        writer.close()
    server.should_exit = True
    await serving


async def test_a_failure_is_an_error_object_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as port:
        reader, _ = await connect(port, GET % b"fail")
        status, body = await read_answer(reader)
    assert status == 500 and body["error"]["type"] == "server_error"
    (record,) = [each for each in caplog.records if each.name == "etude.http"]
    line = record.getMessage()
    assert "GET /fail failed: RuntimeError: broken in two" in line and "\n" not in line


async def test_a_client_that_leaves_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as port:
        _, writer = await connect(port, POST % (b"", 500) + b"{")
        writer.close()
        reader, other = await connect(port, GET % b"")
        await read_answer(reader)
        other.close()
    assert not [each for each in caplog.records if each.name == "etude.http" and each.levelname != "INFO"]


async def test_a_compressed_body_is_refused_by_name() -> None:
    async with serve() as port:
        reader, _ = await connect(port, (POST % (b"", 0))[:-2] + b"Content-Encoding: gzip\r\n\r\n")
        status, body = await read_answer(reader)
    assert status == 415 and "compressed (gzip)" in body["error"]["message"]


@pytest.mark.parametrize(("shown", "is_it"), [("key", True), ("", False), ("keys", False), ("\ud800", False)])
def test_a_key_is_the_key_or_not(shown: str, is_it: bool) -> None:
    assert is_key(shown, "key") is is_it


@given(st.integers(1, 10**6), st.integers())
def test_a_wait_is_any_time_up_to_a_bound_that_doubles(number: int, seed: int) -> None:
    policy = RetryPolicy(first_wait=0.5, longest_wait=30.0)
    most = min(30.0, 0.5 * 2.0 ** min(number - 1, 60))
    assert 0 <= policy.wait(number, None, random.Random(seed)) <= most


@given(st.floats(0, 1e9))
def test_a_servers_word_goes_first_up_to_the_longest_wait(asked: float) -> None:
    wait = RetryPolicy(first_wait=0.5, longest_wait=30.0).wait(1, asked, random.Random(1))
    assert min(asked, 30.0) <= wait <= min(asked + 0.5, 30.0)


@pytest.mark.parametrize(("value", "seconds"), [("0.5", 0.5), ("-3", None), ("soon", None), ("nan", None)])
def test_retry_after_is_taken_as_far_as_it_can_be_meant(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value}) == seconds
    assert retry_after({"retry-after-ms": "250", "retry-after": value}) == 0.25
    assert retry_after({}) is None


def test_what_may_do_better_later() -> None:
    tried = {status for status in range(200, 600) if is_worth_retrying(status)}
    assert tried == {408, 409, 425, 429} | (set(range(500, 600)) - {501, 505})


class Flaky:
    """Fails so often, and then answers."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.attempts = 0

    async def __call__(self) -> str:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise Retryable(f"attempt {self.attempts}", cause="connection")
        return "well"


async def test_each_retry_is_counted_by_its_cause_with_the_time_waited() -> None:
    flaky = Flaky(2)
    with count_retries() as count:
        assert await with_retries(flaky, policy=RetryPolicy(first_wait=0.01)) == "well"
    assert (flaky.attempts, count.causes) == (3, {"connection": 2})
    assert 0 < count.waited <= 0.03


@pytest.mark.parametrize("policy", [RetryPolicy(retries=1), RetryPolicy(retries=9, deadline=0.0)])
async def test_attempts_and_time_are_limited(policy: RetryPolicy) -> None:
    flaky = Flaky(100)
    with pytest.raises(Retryable, match=r"attempt (1|2)$"):
        await with_retries(flaky, policy=RetryPolicy(policy.retries, 0.01, 0.01, policy.deadline))
    assert flaky.attempts == min(policy.retries + 1, 2) - (policy.deadline == 0.0)
