"""The HTTP client of engines: over real sockets, to servers that keep to HTTP or do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from etude.inference.http_addresses import HttpClient

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


class Server:
    """Answers each request by `answer`, on as many connections as it is asked on."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0
        self.heads: list[bytes] = []
        self.asked, self.left = asyncio.Event(), asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self.asked.set()
                length = next(
                    (line for line in head.lower().split(b"\r\n") if b"content-length" in line), b":0"
                )
                await reader.readexactly(int(length.split(b":")[1]))
                await self.answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.left.set()
            writer.close()


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[Server]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/path?query=1"
    async with listening:
        yield server


def says(*pieces: bytes, closes: bool = False) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if closes:
            writer.close()

    return answer


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def client_of(read_seconds: float | None = None, megabytes: float = 64) -> HttpClient:
    return HttpClient(
        {"x-own": "1"}, read_seconds=read_seconds, most_megabytes=megabytes, setting="a setting"
    )


async def test_requests_one_after_another_go_over_one_connection() -> None:
    async with served(says(OK)) as server:
        client = client_of()
        for number in range(3):
            answer = await client.post(server.url, b"x" * number, {"x-more": "2"})
            assert (answer.status_code, answer.content) == (200, b"ok")
        assert (await client.get(server.url)).content == b"ok"
        assert server.connections == 1
        first, last = server.heads[0].lower(), server.heads[-1]
        assert first.startswith(b"post /path?query=1 http/1.1\r\nhost: 127.0.0.1:")
        assert b"x-own: 1\r\n" in first and b"x-more: 2\r\n" in first
        assert last.startswith(b"GET /path?query=1 HTTP/1.1\r\n")
        await asyncio.gather(*(client.post(server.url, b"") for _ in range(3)))
        assert server.connections == 3
        await client.close()
        await client.close()


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async with served(says(OK, closes=True)) as server:
        client = client_of()
        for count in range(1, 4):
            assert (await client.post(server.url, b"")).content == b"ok"
            assert server.connections == count
        await client.close()


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\nab", b"c"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n", b"abc"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-", b"Length: 3\r\n\r\nabc"),
    ],
)
async def test_an_answer_in_any_form_is_read_to_its_end(pieces: tuple[bytes, ...]) -> None:
    async with served(says(*pieces, closes=True)) as server:
        client = client_of()
        for _ in range(2):
            assert (await client.post(server.url, b"{}")).content == b"abc"
        await client.close()


async def test_the_rest_of_an_answer_that_was_not_read_is_no_other_answer() -> None:
    async with served(says(b"HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n", b"x" * 400_000)) as server:
        client = client_of()
        async with client.stream(server.url, b"") as answer:
            assert answer.status_code == 200
        server.answer = says(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad")
        for count in (2, 3):  # What nobody asked for is no answer either.
            assert (await client.post(server.url, b"")).content == b"ok"
            assert server.connections == count
        await client.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (says(closes=True), "RemoteProtocolError: Server disconnected without sending a response."),
        (says(b"SSH-2.0-OpenSSH\r\n\r\n"), "RemoteProtocolError: "),
        (says(OK[:-1], closes=True), "RemoteProtocolError: "),
        (says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000), "RemoteProtocolError: "),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n"), "AnswerTooLarge: the answer is larger"),
        (silent, "ReadTimeout: "),
        (says(OK[:-1]), "ReadTimeout: "),
    ],
)
async def test_what_is_no_answer_is_an_error_of_httpx_and_the_next_request_has_one(
    answer: Answer, error: str
) -> None:
    async with served(answer) as server:
        client = client_of(0.2 if error.startswith("ReadTimeout") else 60, megabytes=1)
        with pytest.raises(httpx.RequestError) as caught:
            await client.post(server.url, b"{}")
        assert f"{type(caught.value).__name__}: {caught.value}".startswith(error)
        assert str(caught.value.request.url) == server.url
        await asyncio.wait_for(server.left.wait(), 60)
        server.answer = says(OK)
        client = client_of()
        assert (await client.post(server.url, b"")).content == b"ok"
        await client.close()


async def test_where_nobody_listens_there_is_no_connection() -> None:
    async with served(says(OK)) as server:
        url = server.url
    with pytest.raises(httpx.ConnectError, match="All connection attempts failed"):
        await client_of().post(url, b"")


async def test_a_header_that_cannot_be_is_not_sent() -> None:
    async with served(says(OK)) as server:
        with pytest.raises(httpx.LocalProtocolError):
            await client_of().post(server.url, b"", {"x-bad": "a\nb"})
        assert not server.heads


async def test_the_password_in_an_address_is_sent() -> None:
    async with served(says(OK)) as server:
        client = client_of()
        await client.post(server.url.replace("http://", "http://me:secret@"), b"")
        assert b"authorization: basic bwu6c2vjcmv0" in server.heads[0].lower()
        await client.close()


async def test_who_is_cancelled_or_closed_hangs_up() -> None:
    async with served(silent) as server:
        for ends in (lambda task, client: task.cancel(), lambda task, client: client.close()):
            client = client_of()
            server.asked.clear()
            server.left.clear()
            asking = asyncio.ensure_future(client.post(server.url, b"{}"))
            await asyncio.wait_for(server.asked.wait(), 60)
            ended = ends(asking, client)
            if asyncio.iscoroutine(ended):
                await ended
            with pytest.raises((asyncio.CancelledError, httpx.RequestError)):
                await asking
            await asyncio.wait_for(server.left.wait(), 60)


async def test_what_is_not_read_stays_with_the_server() -> None:
    size = 20 * 2**20
    sent = 0

    async def much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * 2**16)
            sent += 2**16
            await writer.drain()

    async with served(much) as server:
        client, seen = client_of(), 0
        async with client.stream(server.url, b"y" * size) as answer:
            await asyncio.sleep(0.2)
            assert sent < size  # The rest waits in the server.
            async for piece in answer.aiter_bytes():
                seen += len(piece)
        assert seen == size
        await client.close()


async def test_the_environments_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(says(OK)) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.partition("/path")[0])
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        client = client_of()
        assert (await client.post("http://models.invalid/v1", b"")).content == b"ok"
        assert proxy.heads[0].startswith(b"POST http://models.invalid/v1 HTTP/1.1")
        await client.close()


def test_uvloops_event_loop_serves_as_well() -> None:
    """uvicorn takes it wherever it is installed."""
    uvloop = pytest.importorskip("uvloop")

    async def twice() -> int:
        async with served(says(OK)) as server:
            client = HttpClient({}, most_megabytes=1, setting="a limit")
            for _ in range(2):
                assert (await client.post(server.url, b"{}")).content == b"ok"
            await client.close()
            return server.connections

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(twice()) == 1
