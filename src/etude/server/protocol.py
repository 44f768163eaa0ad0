"""HTTP connections that are given up when a request's head does not come."""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.h11_impl import H11Protocol

from etude.server.errors import error_object

_TOLD = "the request did not come in time"


def patient_protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, with a limit to the time from the beginning of a connection, or from the last
    answer, to the whole head of a request. A body has limits of its own."""

    class PatientProtocol(H11Protocol):
        """Closes connections whose client sends nothing, or a byte now and then."""

        _head: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._head is not None:
                self._head.cancel()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            if self._head is not None:
                self._head.cancel()
            self._head = self.loop.call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            under_way = self.cycle is not None and not self.cycle.response_complete
            if not under_way and not self.transport.is_closing():
                self.transport.write(_answer())
                self.transport.close()

    return PatientProtocol


def _answer() -> bytes:
    body = json.dumps(error_object(408, _TOLD, code="timeout")).encode()
    head = f"HTTP/1.1 408 Request Timeout\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + body
