"""One connection by plain HTTP/1.1, for requests one after another.

A request takes 1.0 ms of CPU by httpx's client, and 0.3 by this one. Its errors are httpx's.
"""

from __future__ import annotations

import asyncio
import select
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import h11
import httpx

from etude.inference.plain_http import GoodAnswer, PostHead, usual_head

_MOST_UNREAD = 2**18
"""Bytes that are taken from the system before somebody reads them."""
_SHORT = 2**16
"""Bytes of a body that is not left to whoever asked to read."""
_LARGEST_HEAD = 100 * 1024
_NEXT_ADDRESS_SECONDS = 0.25
"""After so long without a connection, the next address of a name is tried as well (RFC 8305)."""


class PlainConnection:
    """A connection to one server, made at the first request, and anew where it has ended or was idle."""

    def __init__(
        self,
        url: httpx.URL,
        *,
        connect_seconds: float,
        read_seconds: float | None,
        idle_seconds: float,
        short: int = _SHORT,
    ) -> None:
        """`read_seconds` limits the wait for each piece of an answer; bodies of up to `short` bytes are read
        at once."""
        self._host, self._port = url.raw_host.decode(), url.port or 80
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._idle_seconds = idle_seconds
        self._short = min(short, _SHORT)
        self._bytes: _Bytes | None = None
        self._http = h11.Connection(h11.CLIENT)
        self._idle_until = 0.0

    async def post(self, head: PostHead, content: bytes) -> GoodAnswer | httpx.Response:
        """As `send`, in a third of its time where request and answer are as usual."""
        if not head.is_usual:
            return await self.send(head.request(content))
        try:
            with _as_httpx(partial(head.request, content)):
                wire = await self._open()
                await wire.write([head.with_body(content)])
                received = await self._piece(wire)
                if (found := usual_head(received, self._short)) is not None:
                    headers, begin, end = found
                    while len(received) < end and (piece := await self._piece(wire)):
                        received += piece
                    if len(received) >= end:
                        self._keep(len(received) == end)
                        return GoodAnswer(headers, received[begin:end])
                # h11 has seen nothing of it so far.
                request = head.request(content)
                self._written(request)
                if received:
                    self._http.receive_data(received)
                return await self._answer(wire, request)
        except BaseException:
            self._drop()
            raise

    async def send(self, request: httpx.Request) -> httpx.Response:
        """The answer to a request whose content is in memory, its body unread unless it is short.

        Close it before the next request. Raises httpx.RequestError.
        """
        try:
            with _as_httpx(lambda: request):
                wire = await self._open()
                await wire.write(self._written(request))
                return await self._answer(wire, request)
        except BaseException:
            self._drop()
            raise

    async def aclose(self) -> None:
        """End it; a request under way fails."""
        self._drop()

    async def _open(self) -> _Bytes:
        loop = asyncio.get_running_loop()
        if self._bytes is not None and loop.time() < self._idle_until and self._bytes.is_quiet():
            return self._bytes
        self._drop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                self._bytes = await self._connected(loop)
        except TimeoutError as error:
            raise httpx.ConnectTimeout("") from error
        except OSError as error:
            # In httpx's words: checks ask by its client, and what they tell is what a run tells.
            raise httpx.ConnectError("All connection attempts failed") from error
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LARGEST_HEAD)
        return self._bytes

    async def _connected(self, loop: asyncio.AbstractEventLoop) -> _Bytes:
        if isinstance(loop, asyncio.BaseEventLoop):
            delay = _NEXT_ADDRESS_SECONDS
            connecting = loop.create_connection(_Bytes, self._host, self._port, happy_eyeballs_delay=delay)
        else:  # uvloop has no such delay: it tries the addresses one after another.
            connecting = loop.create_connection(_Bytes, self._host, self._port)
        return (await connecting)[1]

    def _written(self, request: httpx.Request) -> list[bytes]:
        head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        parts = [self._http.send(head), self._http.send(h11.Data(data=request.content))]
        return [part for part in (*parts, self._http.send(h11.EndOfMessage())) if part]

    async def _answer(self, wire: _Bytes, request: httpx.Request) -> httpx.Response:
        """An answer as h11 reads it, its body unread unless it is short."""
        event = await self._event(wire)
        while isinstance(event, h11.InformationalResponse):
            event = await self._event(wire)
        assert isinstance(event, h11.Response)
        status, headers = event.status_code, event.headers.raw_items()
        if self._is_short(event):
            # Read at once: as a stream, each layer of httpx's would take its part of the time.
            content = b""
            while isinstance(data := await self._event(wire), h11.Data):
                content += data.data
            self._finish()
            return httpx.Response(status, headers=headers, content=content, request=request)
        body = _Body(self._body(wire, request), self._finish)
        return httpx.Response(status, headers=headers, stream=body, request=request)

    def _is_short(self, answer: h11.Response) -> bool:
        """Whether a body is known to be small, and is sent as it is: what is compressed is expanded
        piecewise."""
        headers = dict(answer.headers)
        length = headers.get(b"content-length", b"")
        return length.isdigit() and int(length) <= self._short and b"content-encoding" not in headers

    async def _event(self, wire: _Bytes) -> object:
        """The next event of the answer."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._piece(wire)
            if not data and self._http.their_state is h11.SEND_RESPONSE:
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
            self._http.receive_data(data)
        return event

    async def _piece(self, wire: _Bytes) -> bytes:
        """Some bytes of the answer; none at its end."""
        try:
            return await wire.read(self._read_seconds)
        except TimeoutError as error:
            raise httpx.ReadTimeout("") from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error

    async def _body(self, wire: _Bytes, request: httpx.Request) -> AsyncIterator[bytes]:
        with _as_httpx(lambda: request):
            while isinstance(event := await self._event(wire), h11.Data):
                yield bytes(event.data)

    def _finish(self) -> None:
        """Be ready for another request; where the answer was not read to its end, by another connection."""
        is_over = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        is_over = is_over and not self._http.trailing_data[0]
        if is_over:
            self._http.start_next_cycle()
        self._keep(is_over)

    def _keep(self, is_over: bool) -> None:
        """Keep the connection for another request if nothing of it is left to read."""
        if is_over:
            self._idle_until = asyncio.get_running_loop().time() + self._idle_seconds
        else:
            self._drop()

    def _drop(self) -> None:
        if self._bytes is not None:
            self._bytes.abort()
            self._bytes = None


class _Body(httpx.AsyncByteStream):
    """The body of an answer, as it is sent."""

    def __init__(self, pieces: AsyncIterator[bytes], finish: Callable[[], None]) -> None:
        self._pieces = pieces
        self._finish = finish

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def aclose(self) -> None:
        self._finish()


class _Bytes(asyncio.Protocol):
    """The bytes of a connection: no more are taken in than are read, or sent than are taken."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._unread: deque[bytes] = deque()
        self._size = 0
        self._is_over = self._is_full = False
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it.

    def data_received(self, data: bytes) -> None:
        self._unread.append(data)
        self._size += len(data)
        if self._size > _MOST_UNREAD:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._is_over = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over, self._is_full, self._error = True, False, exc
        self._wake()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    async def write(self, parts: list[bytes]) -> None:
        """Send; where that is not possible any more, reading tells why."""
        self._transport.writelines(parts)
        while self._is_full:
            await self._change()

    async def read(self, seconds: float | None = None) -> bytes:
        """Some bytes; none at the end. Raises TimeoutError where nothing comes in time, and another OSError
        where the connection was broken."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return b""
            await self._change(seconds)
        data = self._unread.popleft()
        if self._size > _MOST_UNREAD >= self._size - len(data):
            self._transport.resume_reading()
        self._size -= len(data)
        return data

    def is_quiet(self) -> bool:
        """Whether it has not ended, and nothing has come that nobody asked for."""
        if self._is_over or self._unread or self._transport.is_closing():
            return False
        # What the event loop has not seen yet.
        number = self._transport.get_extra_info("socket").fileno()
        if sys.platform == "win32":
            return not select.select([number], [], [], 0)[0]
        poll = select.poll()
        poll.register(number, select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """End it now."""
        self._transport.abort()

    async def _change(self, seconds: float | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        if seconds is None:
            await self._waiting
            return
        late = loop.call_later(seconds, _give_up, self._waiting)  # `asyncio.timeout` takes twice as long.
        try:
            await self._waiting
        finally:
            late.cancel()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _give_up(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError())


@contextmanager
def _as_httpx(asked: Callable[[], httpx.Request]) -> Iterator[None]:
    """h11's errors as httpx's, which all have the request."""
    try:
        yield
    except h11.LocalProtocolError as error:
        raise httpx.LocalProtocolError(str(error), request=asked()) from error
    except h11.RemoteProtocolError as error:
        raise httpx.RemoteProtocolError(str(error), request=asked()) from error
    except httpx.RequestError as error:
        error.request = asked()
        raise
