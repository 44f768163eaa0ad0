"""A router in front of servers, as a process of its own: `python routers.py PORT SERVER SERVER …`.

It keeps a session at one server, by the header `x-session-id`, as vLLM's router and Ray Serve's LLM ingress
do. With `--strict` before the port it passes on only OpenAI's fields, and answers with them alone.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_FIELDS = {"model", "messages", "temperature", "top_p", "max_tokens", "seed", "stop", "logprobs"}


class _Router(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    servers: tuple[str, ...] = ()
    is_strict = False

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._pass_on(self.servers[0], None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.is_strict:
            body = {name: value for name, value in body.items() if name in _FIELDS}
        session = self.headers.get("x-session-id", "")
        self._pass_on(self.servers[zlib.crc32(session.encode()) % len(self.servers)], body)

    def _pass_on(self, server: str, body: Any) -> None:
        headers = {name: value for name, value in self.headers.items() if name != "Content-Length"}
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(server + self.path, data, headers)) as reply:
                status, answer = reply.status, reply.read()
        except urllib.error.URLError as error:
            status, answer = 502, json.dumps({"error": {"message": str(error)}}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    _Router.is_strict = sys.argv[1] == "--strict"
    port, *_Router.servers = sys.argv[1 + _Router.is_strict :]
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), _Router)
    server.daemon_threads = True
    server.serve_forever()
