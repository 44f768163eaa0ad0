"""uvicorn's protocol with limits that it does not have: connections, slow clients, and a way to refuse
that the client can read."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from etude.wire.api_error import ApiError
from etude.wire.dialect import error_object
from etude.wire.http_limits import HttpLimits

_LINGER_SECONDS = 5.0
"""For a client to read a refusal while it is still sending."""
_TOGETHER = 64 * 1024
"""Bytes of an answer that wait for the rest of what is written in the same turn of the event loop."""
_AT_ONCE = 4
"""Pieces of requests that are looked at before the event loop looks for new ones."""
_HEALTH = b"GET /health "
"""The begin of a request that waits for no other."""


class LingeringTransport(asyncio.Transport):
    """A transport that goes on reading for a while after `close` where the client is still sending.

    To close with something unread resets the connection, and the client may lose the answer.
    """

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        """`is_sending` is asked at `close`."""
        super().__init__()
        self._transport = transport
        self._is_sending = is_sending
        self._unsent = bytearray()
        self.lingers = False
        """Whether what comes in is nobody's any more."""

    def close(self) -> None:
        """Send what is left and end the connection."""
        if self.lingers:
            return
        self._flush()
        if self._transport.is_closing() or not self._is_sending() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self.lingers = True
        try:
            self._transport.write_eof()
        except OSError:  # The client has gone.
            self._transport.abort()
            return
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._transport.abort)

    def is_closing(self) -> bool:
        """Whether nothing more is to be written."""
        return self.lingers or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """As any transport; what is little and written in one turn of the event loop is sent together.

        The head of an answer and its body are two writes, and each sent by itself would wake the client.
        """
        if self.lingers:
            return
        self._unsent += data
        if len(self._unsent) > _TOGETHER:
            self._flush()  # Now, so that whoever writes on and on learns that he has to wait.
        elif len(self._unsent) == len(data):
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, bytearray()
            self._transport.write(unsent)

    def forget(self) -> None:
        """Hold the protocol no longer, whose connection has ended."""
        self._unsent.clear()
        self._is_sending = bool

    def abort(self) -> None:
        """End the connection now."""
        self._unsent.clear()
        self._transport.abort()

    def pause_reading(self) -> None:
        """As any transport."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As any transport."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As any transport."""
        return self._transport.get_extra_info(name, default)


class Line:
    """Pieces of requests that have come and were not looked at: a few are in each turn of the event loop.

    Of a crowd that comes at once, the event loop would otherwise read and begin all requests before it sees
    the next one. Each connection has one piece here at most, and nothing more is read of it meanwhile.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[LimitedProtocol, bytes]] = deque()
        self._left = _AT_ONCE
        """In this turn."""
        self._is_turning = False

    def may_pass(self) -> bool:
        """Whether a piece is looked at now; if not, it has to be appended."""
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._pieces or not self._left:
            return False
        self._left -= 1
        return True

    def append(self, connection: LimitedProtocol, data: bytes) -> None:
        """The last of the line."""
        self._pieces.append((connection, data))

    def _turn(self) -> None:
        self._left = _AT_ONCE
        self._is_turning = bool(self._pieces)
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
        while self._pieces and self._left:
            self._left -= 1
            connection, data = self._pieces.popleft()
            connection.look_at(data)


class LimitedProtocol(H11Protocol):
    """One connection. It is given up when its client sends no request in time, or takes no answer."""

    limits: ClassVar[HttpLimits]
    waiting: ClassVar[dict[LimitedProtocol, None]]
    """The server's connections without a request, the one that has waited longest first."""
    busy: ClassVar[set[LimitedProtocol]]
    """Those with one."""
    line: ClassVar[Line]

    _head: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _is_refused = False
    _is_in_line = False
    _apps: tuple[Any, Any]
    """The application as far as it is there for everybody, and all of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As any protocol; another connection may have to make room."""
        self._lingering = LingeringTransport(transport, self._is_sending)
        super().connection_made(self._lingering)
        self._apps = _only_open(self.app, self.limits), self.app
        if self._finds_room():
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        """As any protocol, until the answer is that there is none."""
        if self._lingering.lingers:
            return
        if data.startswith(_HEALTH) or self.line.may_pass():
            self._parse(data)
            return
        self._is_in_line = True
        self.transport.pause_reading()
        self.line.append(self, data)

    def look_at(self, data: bytes) -> None:
        """Go on with a piece that has stood in line."""
        self._is_in_line = False
        if not self.transport.is_closing():
            self.transport.resume_reading()  # Before the rest: a body that nobody takes yet pauses it again.
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        if self not in self.busy:
            self.app = self._apps[len(self.busy) < self.limits.connections]
        super().data_received(data)
        if self._is_under_way():
            self._forget_head()
            self.busy.add(self)

    def on_response_complete(self) -> None:
        """Wait for another request."""
        self.busy.discard(self)
        super().on_response_complete()
        self._expect_head()

    def pause_writing(self) -> None:
        """The client does not take its answer, for now."""
        super().pause_writing()
        self._stuck = self.loop.call_later(self.limits.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken some."""
        self._cancel(self._stuck)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """As any protocol."""
        self._forget_head()
        self.busy.discard(self)
        self._cancel(self._stuck)
        super().connection_lost(exc)
        # Else it waits for the garbage collector, which then stops everything for 0.2 s.
        self.cycle = None  # type: ignore[assignment]
        self._lingering.forget()

    def shutdown(self) -> None:
        """End the connection once its request is answered."""
        if not self._lingering.lingers:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST, "that is no HTTP request, or its head is too large")

    def give_up(self, makes_room: bool = False) -> None:
        """End a connection that has no request under way."""
        if self._is_under_way() or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            why = f"the head of the request did not come within {self.limits.seconds:g} seconds"
            if makes_room:
                why = f"no request came, and there are {self._most} connections: this one made room"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, why, "timeout")
        else:  # It has its answer, and still sends the body.
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """A client that asks for WebSockets is answered by HTTP; that is nothing to log."""

    @property
    def _most(self) -> int:
        return self.limits.connections + self.limits.waiting

    def _is_under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_sending(self) -> bool:
        return self._is_refused or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _expect_head(self) -> None:
        self._forget_head()
        if self._is_under_way():  # It was sent before the last one was answered.
            self.busy.add(self)
        elif not self.transport.is_closing():
            self._head = self.loop.call_later(self.limits.seconds, self.give_up)
            self.waiting[self] = None

    def _forget_head(self) -> None:
        self._cancel(self._head)
        self.waiting.pop(self, None)

    def _finds_room(self) -> bool:
        """Have a connection without a request make room; whether this one may stay."""
        if len(self.busy) + len(self.waiting) < self._most:
            return True
        oldest = next((each for each in self.waiting if not each._is_in_line), None)
        if oldest is None:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, _crowded(self.limits), "too_many_connections")
            return False
        oldest.give_up(makes_room=True)
        self.waiting.pop(oldest, None)
        return True

    def _refuse(self, status: HTTPStatus, message: str, code: str | None = None) -> None:
        self._is_refused = True
        body = json.dumps(error_object(status, message, code=code))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-length: {len(body)}\r\n"
        kind = "content-type: application/json\r\nconnection: close\r\n\r\n"
        self.transport.write(f"{head}{kind}{body}".encode())
        self.transport.close()

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def limited_protocol(limits: HttpLimits) -> type[LimitedProtocol]:
    """The protocol of one server's connections."""
    return type(
        "LimitedProtocol",
        (LimitedProtocol,),
        {"limits": limits, "waiting": {}, "busy": set(), "line": Line()},
    )


def _crowded(limits: HttpLimits) -> str:
    return f"the server has requests on {limits.connections} connections, as many as it takes at once"


def _only_open(app: Any, limits: HttpLimits) -> Any:
    """The application as far as it is there for everybody."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in limits.always_open:
            error = ApiError(429, _crowded(limits), code="too_many_connections", retry_after=1, closes=True)
            await error.response(scope["path"])(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer
