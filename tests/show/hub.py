"""A stand-in for the Hugging Face hub, on loopback: what `huggingface_hub` says to it is the real wire.

It keeps repositories in memory. Large files come by Git LFS. It serves what was committed as the hub does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

WRITER, READER = "hf_" + "w" * 30, "hf_" + "r" * 30
"""Tokens: of somebody who may write to `me/…`, and of one who may write nothing."""

LARGE = (".safetensors", ".gguf")


@dataclass
class Stored:
    """One repository."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Their messages."""


@dataclass
class Hub:
    """The repositories of the stand-in, and the requests that it had."""

    url: str = ""
    repositories: dict[str, Stored] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """Large files, by their SHA-256."""
    requests: list[str] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    """Beginnings of requests, such as `POST /api/models/me/sums/commit`, that are cut off."""
    received: int = 0
    """Bytes of large files that came."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """The stand-in, while the block lasts."""
    hub = Hub()

    class Bound(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def log_in(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process ask the stand-in, as somebody who may write to `me/…`; its cache is in `folder`.

    `huggingface_hub` reads HF_ENDPOINT when it is imported.
    """
    monkeypatch.setenv("HF_TOKEN", WRITER)
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_TOKEN_PATH": str(folder / "no token"),
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        hub, parts = self.state, urlsplit(self.path)
        self.body = self._read()
        path = unquote(parts.path)
        line = f"{self.command} {path}"
        hub.requests.append(line)
        if any(line.startswith(failing) for failing in hub.failing):
            self.close_connection = True
            return
        if path.startswith("/lfs/"):
            self._keep_large(path.removeprefix("/lfs/"))
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (WRITER, READER, ""):
            problem = "Invalid credentials in Authorization header"
            self._send(401, {"error": problem}, (problem, ""))
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(token)
        elif path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/").split("/"), token)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._lfs_batch()
        elif "/resolve/" in path:
            self._resolve(path, token)
        else:
            self._send(404, {"error": f"no such page: {line}"})

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _send(self, status: int, data: Any = None, error: tuple[str, str] = ("", ""), **headers: str) -> None:
        """JSON or bytes; `error` is the message and the code of the hub's headers."""
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        lengths = {"Content-Length": str(len(content))}
        named = {"X-Error-Message": error[0], "X-Error-Code": error[1]} if any(error) else {}
        for name, value in {**lengths, **named, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _create(self, token: str) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if token != WRITER or asked["organization"] != "me":
            self._send(
                403, {"error": f"You don't have the rights to create a model under {asked['organization']}"}
            )
        elif name in self.state.repositories:
            self._send(409, {"error": "You already created this", "url": f"{self.state.url}/{name}"})
        else:
            private = asked.get("private", asked.get("visibility") == "private")
            self.state.repositories[name] = Stored(private)
            self._send(200, {"url": f"{self.state.url}/{name}", "name": name})

    def _api(self, words: list[str], token: str) -> None:
        name, what = "/".join(words[:2]), [*words[2:], "revision"][0]
        stored = self.state.repositories.get(name)
        if stored is None or (stored.private and not token):
            status = 404 if token else 401
            self._send(status, {"error": "Repository not found"}, ("Repository not found", "RepoNotFound"))
        elif what in ("preupload", "commit") and (token != WRITER or not name.startswith("me/")):
            self._send(403, {"error": "you must use a write token"})
        else:
            answers = {"revision": self._info, "tree": self._tree, "preupload": self._preupload}
            (answers | {"commit": self._commit})[what](name, stored)

    def _info(self, name: str, stored: Stored) -> None:
        files = [{"rfilename": path} for path in stored.files]
        facts = {"id": name, "private": stored.private, "sha": _sha(stored), "siblings": files, "tags": []}
        self._send(200, facts)

    def _tree(self, name: str, stored: Stored) -> None:
        files = stored.files.items()
        told = [{"type": "file", "path": path, "size": len(data), "oid": _blob(data)} for path, data in files]
        self._send(200, told)

    def _preupload(self, name: str, stored: Stored) -> None:
        told = []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            is_large = path.endswith(LARGE)
            data = stored.files.get(path)
            oid = None if data is None else hashlib.sha256(data).hexdigest() if is_large else _blob(data)
            mode = "lfs" if is_large else "regular"
            told.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send(200, {"files": told})

    def _commit(self, name: str, stored: Stored) -> None:
        files = dict(stored.files)
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                stored.commits.append(value["summary"])
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.state.large[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        stored.files = files
        sha = _sha(stored)
        url = f"{self.state.url}/{name}/commit/{sha}"
        self._send(200, {"success": True, "commitOid": sha, "commitUrl": url})

    def _lfs_batch(self) -> None:
        told = []
        for wanted in json.loads(self.body)["objects"]:
            oid, answer = wanted["oid"], {"oid": wanted["oid"], "size": wanted["size"]}
            if oid not in self.state.large:
                answer["actions"] = {"upload": {"href": f"{self.state.url}/lfs/{oid}", "header": {}}}
            told.append(answer)
        self._send(200, {"transfer": "basic", "objects": told})

    def _keep_large(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.state.large[oid] = self.body
        self.state.received += len(self.body)
        self._send(200, {})

    def _resolve(self, path: str, token: str) -> None:
        name, _, rest = path.strip("/").partition("/resolve/")
        file = rest.partition("/")[2]
        stored = self.state.repositories.get(name)
        if stored is None or (stored.private and not token):
            self._send(404, {"error": "not found"}, ("Repository not found", "RepoNotFound"))
            return
        if file not in stored.files:
            error = ("Entry not found", "EntryNotFound")
            self._send(404, {"error": "not found"}, error, X_Repo_Commit=_sha(stored))
            return
        etag = hashlib.sha256(stored.files[file]).hexdigest()
        self._send(200, stored.files[file], ETag=f'"{etag}"', X_Repo_Commit=_sha(stored))


def _sha(stored: Stored) -> str:
    return hashlib.sha1(json.dumps(stored.commits).encode()).hexdigest()


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
