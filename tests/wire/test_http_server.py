"""The rules of all HTTP servers: on a real one, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from etude.wire.http_server import (
    BackgroundServer,
    RequestChecks,
    is_key,
    listen,
    server_config,
    shown_key,
)

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


async def counting(scope: Scope, receive: Receive, send: Send) -> None:
    """Says how many bytes came; fails at `/fail`."""
    if scope["path"] == "/fail":
        raise RuntimeError("broken\nin two lines")
    body = await Request(scope, receive).body()
    await JSONResponse({"bytes": len(body)})(scope, receive, send)


@asynccontextmanager
async def served(max_body: int = 2**20) -> AsyncIterator[int]:
    listening = listen("127.0.0.1", 0)
    server = BackgroundServer(RequestChecks(counting, max_body=lambda path: max_body), listening)
    yield listening.getsockname()[1]
    await server.close()


async def connected(port: int, text: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    return reader, writer


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of an answer."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode().lower()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length"))
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def test_a_refusal_can_be_read_while_the_body_is_still_being_sent() -> None:
    async with served(max_body=1024) as port:
        for length in (10**11, 40 * 2**20):
            reader, writer = await connected(port, POST % (b"", length))
            for _ in range(40):
                writer.write(b" " * 2**20)
                await writer.drain()
            status, body = await answer_of(reader)
            assert status == 413 and body["error"]["code"] == "request_too_large"
            assert "1024 bytes" in body["error"]["message"]
            writer.close()
        # And where the length is not said.
        reader, writer = await connected(
            port, b"POST / HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write((b"%x\r\n" % 2048) + b"x" * 2048 + b"\r\n")
        assert (await answer_of(reader))[0] == 413
        writer.close()


async def test_a_connection_beyond_the_limit_is_told_so_and_the_others_go_on() -> None:
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(server_config(RequestChecks(counting), connections=3, log_level="critical"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    port = listening.getsockname()[1]
    kept = [await connected(port, GET % b"") for _ in range(2)]
    assert [await answer_of(reader) for reader, _ in kept] == [(200, {"bytes": 0})] * 2
    reader, refused = await connected(port, GET % b"")
    assert b" 503 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    refused.close()
    for _, writer in kept:
        writer.close()
    server.should_exit = True
    await serving


async def test_a_failure_is_an_error_object_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as port:
        reader, _ = await connected(port, GET % b"fail")
        status, body = await answer_of(reader)
    assert status == 500 and body["error"]["type"] == "server_error"
    (record,) = [each for each in caplog.records if each.name == "etude.http"]
    line = record.getMessage()
    assert "GET /fail failed: RuntimeError: broken in two lines" in line and "\n" not in line


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer  a b "}, "a b"),
        ({"authorization": "Basic YW55OmtleQ=="}, "key"),
        ({"authorization": "Basic ?"}, ""),
        ({"x-api-key": "key"}, "key"),
        ({}, ""),
    ],
)
def test_where_a_key_is_shown(headers: dict[str, str], key: str) -> None:
    assert shown_key(headers) == key


@pytest.mark.parametrize(("shown", "is_it"), [("key", True), ("", False), ("keys", False), ("\ud800", False)])
def test_a_key_is_the_key_or_not(shown: str, is_it: bool) -> None:
    assert is_key(shown, "key") is is_it
