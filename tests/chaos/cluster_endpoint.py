"""A paid endpoint of an OpenAI-compatible model: a process of its own that can be killed and started again.

`cluster_endpoint.py PORT JOURNAL LOG NAME` answers until it is killed, each request after a while. An
answer follows from the request, so that every such endpoint gives the same. The log gets a line of JSON for
each request: when it came, its seed, and whether the journal of the run had its answer already.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 0.15
"""That an answer takes on average."""

_SEED_SHIFT = 32
"""Of a call's key, as it is sent as the request's seed."""
_START_SECONDS = 30.0


class Paid:
    """The calls whose answers are in a journal, read anew as they are committed."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._seeds: set[int] = set()
        self._last = 0
        self._connection: sqlite3.Connection | None = None

    def has(self, seed: int) -> bool:
        """Whether the answer to a request of this seed has been committed."""
        if self._connection is None and self._journal.exists():
            self._connection = sqlite3.connect(f"file:{self._journal}?mode=ro", uri=True, timeout=10)
        if self._connection is not None:
            query = "SELECT rowid, value FROM steps WHERE rowid > ? AND key LIKE '%/call/%' ORDER BY rowid"
            try:
                rows = self._connection.execute(query, (self._last,)).fetchall()
            except sqlite3.OperationalError:  # The run is making its tables at this moment.
                rows = []
            for self._last, text in rows:
                call = json.loads(text)
                if call.get("completion") and call["model"] == "helper":
                    self._seeds.add(call["key"] >> _SEED_SHIFT)
        return seed in self._seeds


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, paid: Paid, log: Any, name: str
) -> None:
    """Answer the requests of a connection, one after the other."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            method = head.split(b" ", 1)[0]
            length = next(
                (
                    int(line[15:])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ),
                0,
            )
            body = await reader.readexactly(length)
            if method == b"GET":
                reply: Any = {"object": "list", "data": [{"id": "helper", "object": "model"}]}
            else:
                request = json.loads(body)
                seed = request["seed"]
                line = {"at": time.time(), "seed": seed, "again": paid.has(seed), "by": name}
                os.write(log, f"{json.dumps(line)}\n".encode())
                await asyncio.sleep(SECONDS * (0.5 + seed % 1000 / 1000))
                reply = completion(request)
            data = json.dumps(reply).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
            )
            writer.write(data)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def completion(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a chat, which follows from its messages and its seed."""
    said = hashlib.sha256(json.dumps([request["messages"], request["seed"]]).encode()).hexdigest()
    message = {"role": "assistant", "content": f"hint {int(said[:8], 16) % 1000}"}
    return {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


class EndpointProcess:
    """One such process, which keeps its port when it is started again."""

    def __init__(self, name: str, journal: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.name = name
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._files = (str(journal), str(log))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it listens. Raises SystemExit when it does not in time."""
        command = [sys.executable, "-S", __file__, str(self.port), *self._files, self.name]
        self._process = subprocess.Popen(command)
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise SystemExit(f"the endpoint {self.name} does not listen within {_START_SECONDS:g} s")

    def kill(self) -> None:
        """By SIGKILL; nothing where it does not run."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


async def _serve(port: int, journal: Path, log: Path, name: str) -> None:
    paid = Paid(journal)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    server = await asyncio.start_server(
        lambda reader, writer: answer(reader, writer, paid, descriptor, name), "127.0.0.1", port
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
