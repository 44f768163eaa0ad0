"""An OpenAI-compatible endpoint as a process of its own: killed, hung, and told to misbehave by tests.

`python -m tests.endpoint_process PORT NAME` answers until it is killed. `POST /mode` sets how; `GET /asked`
tells what it was asked.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

from tests.json_server import JsonServer


class _Endpoint:
    def __init__(self, name: str) -> None:
        self.name = name
        self.mode = "well"
        """`well`, `500`, `503`, `401`, `garbage`, `hang`, `other`: with the weights of another model, or
        `hold`: not before it is told another one."""
        self.models: list[str] | None = None
        """Those that it has; None for any."""
        self.asked: list[dict[str, Any]] = []

    def answer(self, path: str, headers: Message, body: bytes) -> tuple[Any, ...]:
        """Status, JSON, and headers where there are any."""
        if path == "/asked":
            return 200, self.asked
        if path == "/mode":
            vars(self).update(json.loads(body))
            return 200, {}
        if body:
            asked = json.loads(body)
            shown = {"authorization": headers["authorization"], "session": headers["x-session-id"]}
            self.asked.append(asked | shown)
        while self.mode == "hold" and body:
            time.sleep(0.01)
        if self.mode == "hang":
            threading.Event().wait()
        if not body:
            names = ["tiny"] if self.models is None else self.models
            return 200, {"object": "list", "data": [{"id": name} for name in names]}
        if self.mode == "garbage":
            return 200, {"choices": "none"}
        if self.mode not in ("well", "other"):
            more = {"retry-after": "300"} if self.mode == "503" else {}
            return int(self.mode), {"error": {"message": f"mode {self.mode}"}}, more
        if self.models is not None and asked["model"] not in self.models:
            return 404, {"error": {"message": f"the model {asked['model']} does not exist"}}
        return 200, self._completion("another" if self.mode == "other" else asked["model"], asked)

    def _completion(self, model: str, asked: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.name}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        answer = {"object": "chat.completion", "model": model, "choices": [choice], "usage": usage}
        if asked.get("return_token_ids"):
            choice["token_ids"] = [7]
            answer["prompt_token_ids"] = [5]
        if asked.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": self.name, "logprob": -0.5, "top_logprobs": []}]}
        return answer


class EndpointProcess:
    """One such process, on a port that it keeps when it is started again."""

    def __init__(self, name: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.name = name
        self.url = f"http://127.0.0.1:{self.port}/v1"
        # Without the site's packages it starts at once.
        self.command = [sys.executable, "-S", "-m", "tests.endpoint_process", str(self.port), name]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(self.command, cwd=Path(__file__).parents[1])
        deadline = time.monotonic() + 60
        while True:
            try:
                self.asked()
                return
            except urllib.error.URLError:
                assert time.monotonic() < deadline, "the endpoint does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        """By SIGKILL; nothing if it does not run."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def behave(self, mode: str = "well", **state: Any) -> None:
        """How it answers from now on."""
        self._ask("/mode", {"mode": mode, **state})

    def asked(self) -> list[dict[str, Any]]:
        """The bodies of the calls so far."""
        bodies: list[dict[str, Any]] = self._ask("/asked")
        return bodies

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=60) as reply:
            return json.load(reply)


if __name__ == "__main__":
    JsonServer(_Endpoint(sys.argv[2]).answer, int(sys.argv[1])).serve_forever()
