"""A paid endpoint of an OpenAI-compatible model: a process of its own that can be killed and started again.

`python -m tests.chaos.cluster_endpoint PORT JOURNAL LOG` answers until it is killed, each request after a
while. An answer follows from the request, so that every such endpoint gives the same. The log gets a line of
JSON for each request: its seed, and whether the journal of the run had its answer already.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

from tests.chaos.acknowledged import is_answered
from tests.json_server import JsonServer

_SECONDS = 0.15
"""That an answer takes on average."""


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


class PaidEndpoint:
    """One such process, which keeps its port when it is started again."""

    def __init__(self, journal: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}/v1"
        files = (str(journal), str(log))
        self._command = [sys.executable, "-m", "tests.chaos.cluster_endpoint", str(port), *files]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(self._command, cwd=Path(__file__).parents[2])
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/models", timeout=60).close()
                return
            except urllib.error.URLError:
                assert time.monotonic() < deadline, "the endpoint does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        """By SIGKILL; nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def serve(port: int, journal: Path, log: Path) -> None:
    """Answer until this process is killed."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def answer(path: str, headers: Message, body: bytes) -> tuple[int, Any]:
        if not body:
            return 200, {"object": "list", "data": [{"id": "helper", "object": "model"}]}
        request = json.loads(body)
        seed = request["seed"]
        line = {"seed": seed, "again": is_answered(journal, seed)}
        os.write(descriptor, f"{json.dumps(line)}\n".encode())
        time.sleep(_SECONDS * (0.5 + seed % 1000 / 1000))
        return 200, completion(request)

    JsonServer(answer, port).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
