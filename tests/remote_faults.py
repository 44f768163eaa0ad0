"""The faults of a model's endpoint by name, and a server that commits them on demand.

`http://host:port/FAULT/v1` commits one always, `…/FAULT/once-ID/v1` at first, `…/well/v1` never.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self, TypeAlias

from tests.json_server import chat_completion

Commit: TypeAlias = Callable[[asyncio.StreamWriter], Awaitable[None]]
Kind: TypeAlias = Literal["temporary", "slow", "refused", "impossible"]

LOGPROBS = (-0.25, -1.5)
_MEGABYTE = 2**20
_BOMB_MEGABYTES = 1024


@dataclass(frozen=True)
class Fault:
    """A way to misbehave, and what a client should make of it.

    `temporary`: worth another attempt. `slow`: the same, once the client has lost its patience. `refused`:
    the endpoint answers nobody. `impossible`: the request is at fault.
    """

    kind: Kind
    commit: Commit
    words: str
    """A part of the error where it does not end."""


def completion(**choice: Any) -> dict[str, Any]:
    """A good answer, with fields of its choice changed."""
    tokens = [{"token": "ab", "logprob": value, "top_logprobs": []} for value in LOGPROBS]
    fields = {"logprobs": {"content": tokens}, "token_ids": [7, 8], **choice}
    return {**chat_completion("tiny", "abab", 3, 2, **fields), "prompt_token_ids": [1, 2, 3]}


def reply(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """An HTTP response."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body


def sends(data: bytes) -> Commit:
    """Bytes that come instead of an answer, or as one."""

    async def commit(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return commit


def says(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Commit:
    """An HTTP response with JSON."""
    return sends(reply(status, json.dumps(body).encode(), headers))


def fails(status: int, message: str, code: str = "", **headers: str) -> Commit:
    """An error as OpenAI writes it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return says(status, {"error": {"message": message, "code": code or None}}, named)


def _logprob(value: Any) -> Commit:
    token = {"token": "a", "logprob": value, "top_logprobs": []}
    return says(200, completion(logprobs={"content": [token, token]}))


def _usage(**counts: int) -> Commit:
    return says(200, completion() | {"usage": counts})


async def _resets(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def endlessly(start: bytes, part: bytes, seconds: float = 0.05) -> Commit:
    """A beginning, and then the same bytes again and again."""

    async def commit(writer: asyncio.StreamWriter) -> None:
        await sends(start)(writer)
        while True:
            await sends(part)(writer)
            await asyncio.sleep(seconds)

    return commit


@cache
def _bomb() -> bytes:
    """A gigabyte of spaces, in a megabyte."""
    return gzip.compress(b" " * (32 * _MEGABYTE)) * (_BOMB_MEGABYTES // 32)


async def _explodes(writer: asyncio.StreamWriter) -> None:
    await sends(reply(200, _bomb(), {"content-encoding": "gzip"}))(writer)


_GOOD = json.dumps(completion()).encode()
_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_FAR = "Fri, 31 Dec 99999999999 23:59:59 GMT"

_TEMPORARY: dict[str, tuple[Commit, str]] = {
    "500": (fails(500, "CUDA error"), "HTTP 500: CUDA error"),
    "502-html": (sends(reply(502, b"<html>Bad Gateway</html>")), "HTTP 502"),
    "503-empty": (sends(reply(503, b"")), "HTTP 503"),
    "503-date": (fails(503, "later", retry_after="Sun, 06 Nov 1994 08:49:37 GMT"), "HTTP 503"),
    **{f"{code}": (fails(code, "busy"), f"HTTP {code}: busy") for code in (408, 409, 429, 504, 529)},
    **{
        f"429-{number}": (fails(429, "wait", retry_after=wait), "HTTP 429")
        for number, wait in enumerate((_FAR, "1e300", "nan", "-7"))
    },
    "reset": (_resets, "Error"),
    "closed": (sends(b""), "Error"),
    "cut": (sends(reply(200, _GOOD[:40], {"content-length": "4000"})), "Error"),
    "cut-chunk": (sends(_CHUNKED + b"100\r\n{"), "Error"),
    "no-http": (sends(b"\x00\x01\x02 hello\r\n\r\n"), "Error"),
    "long-header": (sends(reply(200, _GOOD, {"x": "y" * 2**20})), "Error"),
    "empty": (sends(reply(200, b"")), "malformed JSON"),
    "half-json": (sends(reply(200, _GOOD[:40])), "malformed JSON"),
    "html": (sends(reply(200, b"<html>Sign in</html>")), "malformed JSON"),
    "deep-json": (sends(reply(200, b"[" * 100_000)), "malformed JSON"),
    "no-utf-8": (sends(reply(200, b'{"choices": "\xff\xfe"}')), "malformed JSON"),
    "surrogate": (sends(reply(200, b'{"choices": "\\ud800"}')), "malformed JSON"),
    "list": (says(200, [completion()]), "an answer without choices"),
    "no-choices": (says(200, completion() | {"choices": []}), "an answer without choices"),
    "error-200": (says(200, {"error": {"message": "gone"}}), "without choices: gone"),
    "gave-up": (says(200, completion(finish_reason="abort")), "gave up"),
    "logprob-nan": (_logprob(float("nan")), "malformed JSON"),
    **{
        f"logprob-{value}": (_logprob(value), f"content[0].logprob is {value!r}")
        for value in (7.5, 1e308, -1e308, "text")
    },
    "id-negative": (says(200, completion(token_ids=[7, -1])), "token_ids[1] is -1"),
    "lengths": (says(200, completion(token_ids=[7])), "2 logprobs"),
    "usage-negative": (_usage(prompt_tokens=-1), "usage.prompt_tokens is -1"),
    "usage-absurd": (_usage(completion_tokens=10**30), "completion_tokens"),
    "content-number": (says(200, completion(message={"content": 7})), "content is 7"),
    "large": (sends(reply(200, b"", {"content-length": str(2**30)})), "larger than 32 MB"),
    "endless": (endlessly(_CHUNKED, b"10000\r\n" + b" " * 2**16 + b"\r\n", seconds=0), "larger than 32 MB"),
    "gzip-bomb": (_explodes, "larger than 32 MB"),
    "no-gzip": (sends(reply(200, _GOOD, {"content-encoding": "gzip"})), "Can not decode"),
    "brotli": (sends(reply(200, _GOOD, {"content-encoding": "br"})), "Error"),
}
_SLOW: dict[str, Commit] = {
    "hang": lambda writer: asyncio.sleep(3600),
    "trickle": endlessly(reply(200, b"", {"content-length": "1000000"}), b" "),
    "headers": endlessly(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
}
FAULTS: dict[str, Fault] = {
    **{name: Fault("temporary", *fault) for name, fault in _TEMPORARY.items()},
    **{name: Fault("slow", commit, "request_timeout") for name, commit in _SLOW.items()},
    "204": Fault("refused", sends(b"HTTP/1.1 204 No Content\r\n\r\n"), "HTTP 204"),
    "401": Fault("refused", fails(401, "Incorrect API key", "invalid_api_key"), "Incorrect API key"),
    "403": Fault("refused", fails(403, "not for you"), "HTTP 403"),
    "404": Fault("refused", fails(404, "The model `tiny` does not exist"), "does not exist"),
    "308": Fault("refused", sends(reply(308, b"", {"location": "http://there/v1"})), "http://there/v1"),
    "429-money": Fault("refused", fails(429, "You ran out", "insufficient_quota"), "You ran out"),
    "400": Fault("impossible", fails(400, "wrong", "context_length_exceeded"), "HTTP 400: wrong"),
}


class FaultyEndpoint:
    """Serves HTTP over plain sockets, so that an answer may be any bytes, or none.

    `mended` has every request answered well from then on.
    """

    def __init__(self) -> None:
        self.origin = ""
        self.asked: Counter[str] = Counter()
        """Requests for completions by the fault in their path."""
        self.mended = False
        self.arrived = asyncio.Event()
        """Set by each such request."""
        self._served: Counter[str] = Counter()
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """Within the block it listens."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512, limit=2**24)
        self.origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with suppress(OSError, EOFError, asyncio.CancelledError):
            while await self._read(reader, writer):
                pass
        writer.close()
        self._connections.discard(task)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        start = await reader.readexactly(1)
        if start == b"\x16":  # A TLS handshake.
            await sends(reply(400, b"no HTTP"))(writer)
            return False
        head = (start + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines) if value
        }
        await reader.readexactly(int(headers.get("content-length", 0)))
        return await self._answer(first.split(" ")[1], writer)

    def url(self, fault: str, once: str = "") -> str:
        """The base URL of a fault; committed once where `once` names the occasion."""
        return f"{self.origin}/{fault}/once-{once}/v1" if once else f"{self.origin}/{fault}/v1"

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> bool:
        """Commit the fault in the path, or answer well; whether the connection goes on after that."""
        path = path.split("?")[0].lower()
        if path.endswith("/models"):
            await says(200, {"object": "list", "data": [{"id": "tiny"}]})(writer)
            return True
        name, *rest = path.strip("/").split("/")
        self.asked[name] += 1
        self.arrived.set()
        self._served[path] += 1
        is_over = rest[0].startswith("once-") and self._served[path] > 1
        if self.mended or name == "well" or is_over:
            await says(200, completion())(writer)
            return True
        await FAULTS[name].commit(writer)
        return False
