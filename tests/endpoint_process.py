"""An OpenAI-compatible endpoint as a process of its own: killed, hung, and told to misbehave by tests.

`python endpoint_process.py PORT NAME` answers until it is killed. `POST /mode` sets how; `GET /asked` tells
what it was asked.
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _State:
    mode = "well"
    """`well`, `500`, `503`, `401`, `garbage`, `hang`, `other`: with the weights of another model, or `hold`:
    not before it is told another one."""
    models: list[str] | None = None
    """Those that it has; None for any."""
    asked: list[dict[str, Any]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state = _State()
    name = ""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/asked":
            self._send(200, self.state.asked)
        elif self.state.mode == "hang":
            threading.Event().wait()
        else:
            names = self.state.models if self.state.models is not None else ["tiny"]
            self._send(200, {"object": "list", "data": [{"id": name} for name in names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/mode":
            for name, value in body.items():
                setattr(self.state, name, value)
            self._send(200, {})
            return
        shown = {"authorization": self.headers.get("authorization")}
        self.state.asked.append(body | shown | {"session": self.headers.get("x-session-id")})
        while self.state.mode == "hold":
            time.sleep(0.01)
        mode, models = self.state.mode, self.state.models
        if mode == "hang":
            threading.Event().wait()
        if mode == "garbage":
            self._send(200, {"choices": "none"})
        elif mode not in ("well", "other"):
            headers = {"retry-after": "300"} if mode == "503" else {}
            self._send(int(mode), {"error": {"message": f"mode {mode}"}}, headers)
        elif models is not None and body["model"] not in models:
            self._send(404, {"error": {"message": f"the model {body['model']} does not exist"}})
        else:
            self._send(200, self._completion("another" if mode == "other" else body["model"], body))

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

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class EndpointProcess:
    """One such process, on a port that it keeps when it is started again."""

    def __init__(self, name: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.name = name
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen([sys.executable, "-S", __file__, str(self.port), self.name])
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
    _Handler.state.asked = []
    _Handler.name = sys.argv[2]
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler)
    server.daemon_threads = True
    server.serve_forever()
