"""The limits of all HTTP servers: on a real one, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from etude.wire.door import Door
from etude.wire.http_limits import HttpLimits
from etude.wire.http_protocol import LimitedProtocol, Line, LingeringTransport
from etude.wire.http_server import BackgroundServer, ThreadServer, listen

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


class App:
    """Counts the bytes that come; `/wait` until it is told, `/fail`, and `/endless`."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.left = asyncio.Event()
        self.entered = asyncio.Semaphore(0)
        self.begun = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/fail":
            raise RuntimeError("broken\nin two lines")
        if path == "/endless":
            await self._send_on(receive, send)
            return
        if path == "/wait":
            self.begun += 1
            self.entered.release()
            await self.told.wait()
        body = await Request(scope, receive).body()
        await JSONResponse({"bytes": len(body)})(scope, receive, send)

    async def _send_on(self, receive: Receive, send: Send) -> None:
        await receive()
        left = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not left.done():
            await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
        self.left.set()


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[tuple[App, int]]:
    app, own, listening = App(), HttpLimits(**limits), listen("127.0.0.1", 0)
    server = BackgroundServer(Door(app, own), own, listening)
    yield app, listening.getsockname()[1]
    app.told.set()
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
    async with served(max_body=1024) as (_, port):
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


async def test_a_byte_now_and_then_keeps_no_connection() -> None:
    async with served(seconds=0.3) as (_, port):
        for begin in (POST % (b"", 10_000), b"GET / HTTP/1.1\r\nX-Long: "):
            reader, writer = await connected(port, begin)
            refused = asyncio.ensure_future(answer_of(reader))
            while not refused.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
            status, body = await refused
            assert status == 408 and body["error"]["code"] == "timeout"
            assert "0.3 seconds" in body["error"]["message"]
            writer.close()


async def test_a_client_that_takes_no_answer_is_given_up() -> None:
    async with served(seconds=0.2) as (app, port):
        _, writer = await connected(port, GET % b"endless")
        await asyncio.wait_for(app.left.wait(), 60)
        writer.close()


async def test_a_new_connection_takes_the_place_of_the_one_that_has_waited_longest() -> None:
    async with served(connections=1, waiting=1) as (_, port):
        oldest, *others = [await connected(port) for _ in range(2)]
        reader, _ = await connected(port, GET % b"")
        assert await answer_of(reader) == (200, {"bytes": 0})
        status, body = await answer_of(oldest[0])
        assert status == 408 and body["error"]["code"] == "timeout"
        assert "there are 2 connections: this one made room" in body["error"]["message"]
        others[0][1].write(GET % b"")
        assert await answer_of(others[0][0]) == (200, {"bytes": 0})


async def test_health_does_not_wait_behind_a_crowd() -> None:
    """Requests that came with it in the same turn of the event loop are begun after it, a few at a time."""
    async with served(connections=1000) as (app, port):
        crowd = [await connected(port) for _ in range(100)]
        beside, writer = await connected(port)
        for _, each in crowd:
            each.write(GET % b"wait")
        writer.write(GET % b"health")
        assert await answer_of(beside) == (200, {"bytes": 0})
        assert app.begun < len(crowd)
        writer.close()
        app.told.set()
        assert {(await answer_of(reader))[0] for reader, _ in crowd} == {200}


async def test_a_request_in_many_pieces_keeps_their_order_behind_a_crowd() -> None:
    async with served(connections=1000) as (app, port):
        crowd = [await connected(port, GET % b"wait") for _ in range(40)]
        reader, writer = await connected(port)
        head = POST % (b"", 3)
        for piece in (head[:9], head[9:], b"a", b"b", b"c"):
            writer.write(piece)
            await writer.drain()
        for _, gone in crowd[20:]:
            gone.close()
        assert await answer_of(reader) == (200, {"bytes": 3})
        app.told.set()
        assert {(await answer_of(each))[0] for each, _ in crowd[:20]} == {200}


async def test_a_crowd_that_sends_much_is_read_no_faster_than_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each connection has one piece in memory at most; the rest stays with the client."""
    held: list[int] = []
    append = Line.append

    def counted(line: Line, connection: LimitedProtocol, data: bytes) -> None:
        append(line, connection, data)
        held.append(sum(each is connection for each, _ in line._pieces))

    monkeypatch.setattr(Line, "append", counted)
    size = 2 * 2**20
    async with served(connections=1000) as (_, port):
        crowd = [await connected(port, POST % (b"", size)) for _ in range(20)]
        for _, writer in crowd:
            writer.write(b" " * size)
        for reader, _ in crowd:
            assert await answer_of(reader) == (200, {"bytes": size})
    assert max(held) == 1


async def test_many_at_once_do_not_drive_one_another_out() -> None:
    """A connection that has just come makes no room for the next before its request is read."""
    async with served(connections=4) as (app, port):
        crowd = [await connected(port, GET % b"wait") for _ in range(60)]
        beside, writer = await connected(port, GET % b"health")
        for _ in range(4):
            await app.entered.acquire()
        assert await answer_of(beside) == (200, {"bytes": 0})
        writer.close()
        app.told.set()
        statuses = [(await answer_of(reader))[0] for reader, _ in crowd]
        assert sorted(set(statuses)) == [200, 429] and statuses.count(200) == 4


async def test_with_all_connections_at_work_only_health_is_answered() -> None:
    async with served(connections=2) as (app, port):
        busy = [await connected(port, GET % b"wait") for _ in range(2)]
        for _ in busy:
            await app.entered.acquire()
        reader, _ = await connected(port, GET % b"health")
        assert await answer_of(reader) == (200, {"bytes": 0})
        reader, _ = await connected(port, GET % b"")
        status, body = await answer_of(reader)
        assert (
            status == 429
            and body["error"]["code"] == "too_many_connections"
            and "2 connections" in body["error"]["message"]
        )
        app.told.set()
        for reader, _ in busy:
            assert await answer_of(reader) == (200, {"bytes": 0})


async def test_what_is_no_http_is_told_so() -> None:
    async with served() as (_, port):
        for text in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000):
            reader, _ = await connected(port, text)
            status, body = await answer_of(reader)
            assert status == 400 and "no HTTP" in body["error"]["message"]


async def test_a_failure_is_an_error_object_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as (_, port):
        reader, _ = await connected(port, GET % b"fail")
        status, body = await answer_of(reader)
    assert status == 500 and body["error"]["type"] == "server_error"
    (record,) = [each for each in caplog.records if each.name == "etude.http"]
    line = record.getMessage()
    assert "GET /fail failed: RuntimeError: broken in two lines" in line and "\n" not in line


async def test_a_server_in_a_thread_answers_while_the_loop_does_not_turn() -> None:
    limits, listening, app = HttpLimits(), listen("127.0.0.1", 0), App()
    server = ThreadServer(Door(app, limits), limits, listening)
    with socket.create_connection(listening.getsockname(), timeout=60) as connection:
        connection.sendall(GET % b"")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    server.close()


async def test_head_and_body_of_an_answer_are_sent_together_and_much_is_sent_at_once() -> None:
    wire = Wire()
    transport = LingeringTransport(wire, bool)
    transport.write(b"head ")
    transport.write(b"body")
    assert not wire.sent
    await asyncio.sleep(0)
    assert wire.sent == [b"head body"]
    transport.write(b"x" * 2**17)
    assert wire.sent[1:] == [b"x" * 2**17], "whoever writes on and on has to learn that the client is slow"
    transport.write(b"last")
    transport.close()
    assert wire.sent[2:] == [b"last", b"closed"]


class Wire(asyncio.Transport):
    """Notes what it is to send."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.sent.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.sent.append(b"closed")
