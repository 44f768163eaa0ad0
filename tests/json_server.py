"""A server on this machine that answers JSON, as a function of the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, TypeAlias

Answer: TypeAlias = Callable[[str, Message, bytes], tuple[Any, ...]]
"""Status and JSON, and on demand headers, for a path, headers and a body, which is empty for GET."""


def chat_completion(model: str, text: str, prompt: int = 1, tokens: int = 1, **choice: Any) -> dict[str, Any]:
    """An answer of OpenAI's API, with numbers of tokens, and fields of its choice changed."""
    message = {"role": "assistant", "content": text, "refusal": None}
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    chosen = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", **choice}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model}
    return {**answer, "choices": [chosen], "usage": usage}


class JsonServer(ThreadingHTTPServer):
    """Serves within `with`, each request in a thread of its own; `url` is its address."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Answer, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are stopped wait for no answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JsonServer

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"])))

    def _answer(self, body: bytes) -> None:
        status, value, *more = self.server.answer(self.path, self.headers, body)
        data = json.dumps(value).encode()
        self.send_response(status)
        fields = {"content-type": "application/json", "content-length": str(len(data))}
        for name, text in fields.items() | (more[0].items() if more else ()):
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
