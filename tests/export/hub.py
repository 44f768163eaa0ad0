"""A stand-in for the Hugging Face hub, on loopback: what `huggingface_hub` says to it is the real wire.

It keeps repositories in memory. Large files come as the installed client sends them: by Git LFS, or by Xet,
whose blocks and shards are taken apart as its format has them. It serves what was committed as the hub does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from huggingface_hub import constants

WRITER, READER = "hf_" + "w" * 30, "hf_" + "r" * 30
"""Tokens: of somebody who may write to `me/…`, and of one who may write nothing."""

LARGE = (".safetensors", ".gguf")
CAS = "/cas"


@dataclass
class Stored:
    """One repository: the files of each commit, by branch."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[str] = field(default_factory=list)
    """Their messages."""


@dataclass
class Hub:
    """The repositories of the stand-in, and the requests that it had."""

    url: str = ""
    repositories: dict[str, Stored] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """Large files, by their SHA-256."""
    chunks: dict[str, list[bytes]] = field(default_factory=dict)
    """Of each Xet block."""
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
        if path.startswith((CAS, "/lfs/")):
            self._blocks(path)
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (WRITER, READER, ""):
            problem = "Invalid credentials in Authorization header"
            self._send(401, {"error": problem}, (problem, ""))
        elif path == "/api/validate-yaml":
            self._look_at_card()
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

    def _look_at_card(self) -> None:
        """As the hub looks at the front matter before an upload: a license is one of its list."""
        front = yaml.safe_load(json.loads(self.body)["content"].split("---")[1])
        wrong = front.get("license", "mit") not in ("mit", "apache-2.0", "llama3.2")
        errors = [{"message": '"license" must be one of [apache-2.0, mit, ...]'}] if wrong else []
        self._send(400 if wrong else 200, {"errors": errors, "warnings": []})

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
        name, rest = "/".join(words[:2]), words[2:]
        stored = self.state.repositories.get(name)
        if stored is None or (stored.private and not token):
            status = 404 if token else 401
            self._send(status, {"error": "Repository not found"}, ("Repository not found", "RepoNotFound"))
            return
        what, branch = ([*rest, ""])[0], rest[1] if len(rest) > 1 else "main"
        branch = "main" if branch == _sha(stored) else branch
        writes = what in ("preupload", "commit", "branch", "xet-write-token")
        if writes and (token != WRITER or not name.startswith("me/")):
            self._send(403, {"error": "you must use a write token"})
        elif what == "branch":
            stored.branches.setdefault(branch, dict(stored.branches["main"]))
            self._send(200, {})
        elif branch not in stored.branches:
            self._send(404, {"error": "Revision not found"}, ("Revision not found", "RevisionNotFound"))
        else:
            {
                "": self._info,
                "revision": self._info,
                "tree": self._tree,
                "preupload": self._preupload,
                "commit": self._commit,
                "xet-write-token": self._xet_token,
            }[what](name, stored, branch)

    def _info(self, name: str, stored: Stored, branch: str) -> None:
        files = [{"rfilename": path} for path in stored.branches[branch]]
        facts = {"id": name, "private": stored.private, "sha": _sha(stored), "siblings": files, "tags": []}
        self._send(200, facts)

    def _tree(self, name: str, stored: Stored, branch: str) -> None:
        self._send(
            200,
            [
                {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}
                for path, data in stored.branches[branch].items()
            ],
        )

    def _preupload(self, name: str, stored: Stored, branch: str) -> None:
        there, told = stored.branches[branch], []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            is_large = path.endswith(LARGE)
            data = there.get(path)
            oid = None if data is None else hashlib.sha256(data).hexdigest() if is_large else _blob(data)
            mode = "lfs" if is_large else "regular"
            told.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send(200, {"files": told})

    def _commit(self, name: str, stored: Stored, branch: str) -> None:
        files = dict(stored.branches[branch])
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
        stored.branches[branch] = files
        sha = _sha(stored)
        url = f"{self.state.url}/{name}/commit/{sha}"
        self._send(200, {"success": True, "commitOid": sha, "commitUrl": url})

    def _xet_token(self, name: str, stored: Stored, branch: str) -> None:
        facts = {"casUrl": self.state.url + CAS, "accessToken": "a-token-of-the-store", "exp": 4102444800}
        headers = {"X_Xet_Cas_Url": facts["casUrl"], "X_Xet_Access_Token": facts["accessToken"]}
        self._send(200, facts, **headers, X_Xet_Token_Expiration=str(facts["exp"]))

    def _lfs_batch(self) -> None:
        told = []
        for wanted in json.loads(self.body)["objects"]:
            oid, answer = wanted["oid"], {"oid": wanted["oid"], "size": wanted["size"]}
            if oid not in self.state.large:
                answer["actions"] = {"upload": {"href": f"{self.state.url}/lfs/{oid}", "header": {}}}
            told.append(answer)
        self._send(200, {"transfer": "basic", "objects": told})

    def _blocks(self, path: str) -> None:
        """Large content: whole by LFS, or in Xet's blocks, of which a shard makes files."""
        hub, last = self.state, path.rsplit("/", 1)[-1]
        if self.command == "PUT":
            assert hashlib.sha256(self.body).hexdigest() == last
            hub.large[last] = self.body
        elif "/xorbs/" in path and self.command == "POST":
            hub.chunks[last] = list(_chunks(self.body))
        elif path.endswith("/shards"):
            for blocks in _read_files(self.body):
                data = b"".join(b"".join(hub.chunks[block][start:end]) for block, start, end in blocks)
                hub.large[hashlib.sha256(data).hexdigest()] = data
            self._send(200, {"type": "result", "result": 1})
            return
        else:
            self._send(404, {"error": "not known here"})
            return
        hub.received += len(self.body)
        self._send(200, {"was_inserted": True})

    def _resolve(self, path: str, token: str) -> None:
        name, _, rest = path.strip("/").partition("/resolve/")
        branch, _, file = rest.partition("/")
        stored = self.state.repositories.get(name)
        if stored is None or (stored.private and not token):
            self._send(404, {"error": "not found"}, ("Repository not found", "RepoNotFound"))
            return
        files = stored.branches.get("main" if branch == _sha(stored) else branch, {})
        if file not in files:
            error = ("Entry not found", "EntryNotFound")
            self._send(404, {"error": "not found"}, error, X_Repo_Commit=_sha(stored))
            return
        etag = hashlib.sha256(files[file]).hexdigest()
        self._send(200, files[file], ETag=f'"{etag}"', X_Repo_Commit=_sha(stored))


def _sha(stored: Stored) -> str:
    return hashlib.sha1(json.dumps(stored.commits).encode()).hexdigest()


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _chunks(block: bytes) -> Iterator[bytes]:
    """The chunks of a Xet block ("xorb"): a header of 8 bytes each, and the bytes, packed or not."""
    import pyarrow

    at = 0
    while at < len(block) and block[at : at + 7] != b"XETBLOB":
        packed, kind = int.from_bytes(block[at + 1 : at + 4], "little"), block[at + 4]
        length = int.from_bytes(block[at + 5 : at + 8], "little")
        data = block[at + 8 : at + 8 + packed]
        at += 8 + packed
        if kind:
            data = pyarrow.Codec("lz4").decompress(data, decompressed_size=length).to_pybytes()
        if kind == 2:  # The bytes of each group of four, apart.
            out, begin = bytearray(length), 0
            for group in range(4):
                count = len(range(group, length, 4))
                out[group::4] = data[begin : begin + count]
                begin += count
            data = bytes(out)
        yield data


def _read_files(shard: bytes) -> Iterator[list[tuple[str, int, int]]]:
    """The files of a Xet shard: for each, the blocks and their chunks from … to."""
    at = 48
    while shard[at : at + 32] != b"\xff" * 32:
        flags, count = struct.unpack_from("<II", shard, at + 32)
        at += 48
        blocks = []
        for _ in range(count):
            _, _, start, end = struct.unpack_from("<IIII", shard, at + 32)
            blocks.append((_hash(shard[at : at + 32]), start, end))
            at += 48
        at += 48 * count * bool(flags & 1 << 31) + 48 * bool(flags & 1 << 30)
        yield blocks


def _hash(data: bytes) -> str:
    """As Xet writes hashes: four numbers of 64 bits."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", data))
