"""A machine without time of its own: an event loop whose clock jumps, and a network between its ends.

Whatever waits for a time waits no longer than that takes to look up. The same run gives the same times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class Listening:
    """A server, as far as it is closed."""

    def close(self) -> None:
        """Nobody calls any more."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is due, and then goes to the time of what is due next."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self
        self.servers: dict[str, Callable[[], asyncio.Protocol]] = {}
        """Those that listen, by the paths of their sockets."""

    def time(self) -> float:
        return self._now

    def select(self, seconds: float | None) -> list[Any]:
        """Let so many seconds pass, as a selector that nothing happens to does."""
        if seconds is None:
            raise RuntimeError("everything waits for something, and nothing is due any more")
        if seconds > 0:
            # Exactly there: a sum of differences would fall short of it.
            self._now = max(self._now, self._scheduled[0].when())
        return []

    def _process_events(self, events: list[Any]) -> None:
        """There are none."""

    async def create_unix_server(self, factory: Any, path: str, **options: Any) -> Listening:
        """Listen at a path of this loop's own."""
        self.servers[path] = factory
        return Listening()


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """The result of `main`, run to its end in a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))


@dataclass
class Station:
    """Does one thing after another: a processor, a link, a disk."""

    free_at: float = 0.0
    taken: float = 0.0
    """Seconds of work that it was given so far."""

    def done_at(self, arrival: float, seconds: float) -> float:
        """When work that arrives then, and takes so long, is done."""
        self.free_at = max(self.free_at, arrival) + seconds
        self.taken += seconds
        return self.free_at

    def busy_until(self, now: float) -> float:
        """Seconds that it has worked so far."""
        return self.taken - max(0.0, self.free_at - now)


Carry = Callable[[bytes, Callable[[bytes], None]], None]
"""Brings what was written to the other end, in time and in order."""


@dataclass(eq=False)
class Wire(asyncio.Transport):
    """One end of a connection."""

    loop: VirtualLoop
    protocol: asyncio.Protocol
    carry: Carry
    peer: Wire = field(init=False)
    is_closed: bool = False

    def write(self, data: Any) -> None:
        """Have it carried to the other end; into the void where that is closed."""
        if not self.is_closed:
            self.carry(bytes(data), self.peer.receive)

    def receive(self, data: bytes) -> None:
        """Take what the other end has written, or its end."""
        if self.is_closed:
            return
        if data:
            self.protocol.data_received(data)
        else:
            self.abort()

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        """Close both ends; what was written before arrives before."""
        if not self.is_closed:
            self.carry(b"", self.peer.receive)
            self.abort()

    def abort(self) -> None:
        """Close this end; the other one is not told."""
        if not self.is_closed:
            self.is_closed = True
            self.loop.call_soon(self.protocol.connection_lost, None)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def connect(loop: VirtualLoop, path: str, to_server: Carry, to_client: Carry) -> Any:
    """A connection with whoever listens at a path: reader and writer of the client's end, and its wire."""
    served = loop.servers[path]()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    client, server = Wire(loop, protocol, to_server), Wire(loop, served, to_client)
    client.peer, server.peer = server, client
    protocol.connection_made(client)
    served.connection_made(server)
    return reader, asyncio.StreamWriter(client, protocol, reader, loop), client
