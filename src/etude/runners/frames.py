"""Frames: JSON values on a stream, each after its length, between two ends that have proved who they are."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etude.core.errors import EtudeError

_LENGTH_BYTES = 4
_MOST_BYTES = 2**31
_MOST_BYTES_BEFORE_PROOF = 4096
_PROOF_SECONDS = 20.0
_CLOSE_SECONDS = 5.0
"""For the other end to take what was sent before."""


class Disconnected(EtudeError):
    """The other end of a stream is gone."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Two ends of a connection as one value."""

    reader: StreamReader
    writer: StreamWriter

    def send(self, frame: Any) -> None:
        """Have a frame sent. Raises TypeError or ValueError for what is no JSON: nothing is sent then."""
        data = json.dumps(frame, separators=(",", ":")).encode()
        if len(data) >= _MOST_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is too long; the most is {_MOST_BYTES}")
        self.writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def receive(self, most: int = _MOST_BYTES) -> Any:
        """The next frame. Raises Disconnected when there is none, or what comes is no frame."""
        try:
            length = int.from_bytes(await self.reader.readexactly(_LENGTH_BYTES), "big")
            if length >= most:
                raise Disconnected(f"a message of {length} bytes is not one of ours")
            return json.loads(await self.reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Disconnected("the connection was closed") from error
        except ValueError as error:
            raise Disconnected("what came is not one of our messages") from error

    async def close(self) -> None:
        """Close the connection; what was sent before is still delivered, to a peer that takes it in time."""
        self.writer.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.writer.wait_closed()
        except TimeoutError:
            self.writer.transport.abort()
        except OSError:
            return


async def accept(stream: Stream, key_of: Callable[[int], bytes | None]) -> int:
    """The number of the runner that calls, which has proved that it knows the key of that number.

    Neither end shows the key: each answers a random challenge of the other. Raises Disconnected.
    """
    async with asyncio.timeout(_PROOF_SECONDS):
        hello = await stream.receive(_MOST_BYTES_BEFORE_PROOF)
        number: int = _field(hello, "runner", int)
        theirs = _field(hello, "challenge", str)
        key, ours = key_of(number), secrets.token_hex(32)
        if key is None:
            raise Disconnected("a runner called that nobody waits for")
        stream.send({"challenge": ours, "proof": _proof(key, "head", theirs, ours)})
        answer = await stream.receive(_MOST_BYTES_BEFORE_PROOF)
        if not hmac.compare_digest(_field(answer, "proof", str), _proof(key, "runner", theirs, ours)):
            raise Disconnected("a runner called that does not know its key")
        return number


async def introduce(stream: Stream, number: int, key: bytes) -> None:
    """Prove to the head that this is the runner of that number. Raises Disconnected where it is no head."""
    async with asyncio.timeout(_PROOF_SECONDS):
        ours = secrets.token_hex(32)
        stream.send({"runner": number, "challenge": ours})
        answer = await stream.receive(_MOST_BYTES_BEFORE_PROOF)
        theirs = _field(answer, "challenge", str)
        if not hmac.compare_digest(_field(answer, "proof", str), _proof(key, "head", ours, theirs)):
            raise Disconnected("the process at the head's address does not know the key")
        stream.send({"proof": _proof(key, "runner", ours, theirs)})


def _proof(key: bytes, who: str, runners: str, heads: str) -> str:
    return hmac.new(key, f"{who} {runners} {heads}".encode(), hashlib.sha256).hexdigest()


def _field(frame: Any, name: str, kind: type[Any]) -> Any:
    value = frame.get(name) if isinstance(frame, dict) else None
    if type(value) is not kind:
        raise Disconnected("what came is not one of our messages")
    return value
