"""A stand-in for the Hugging Face hub, on loopback: what `huggingface_hub` says to it is the real wire.

It keeps repositories in memory, and takes all files without Git LFS.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests.json_server import JsonServer

WRITER, READER = "hf_" + "w" * 30, "hf_" + "r" * 30
"""Tokens: of somebody who may write to `me/…`, and of one who may write nothing."""


@dataclass
class Stored:
    """One repository."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Their messages."""


def log_in(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process ask a hub at this address, as somebody who may write to `me/…`.

    `huggingface_hub` reads HF_ENDPOINT when it is imported.
    """
    monkeypatch.setenv("HF_TOKEN", WRITER)
    paths = {"HF_TOKEN_PATH": str(folder / "no token"), "HF_HUB_CACHE": str(folder / "cache")}
    for name, value in {"ENDPOINT": address, "HF_HUB_OFFLINE": False, **paths}.items():
        monkeypatch.setattr(constants, name, value)


class Hub(JsonServer):
    """The stand-in, with its repositories by name."""

    def __init__(self) -> None:
        super().__init__(self._respond)
        self.address = self.url.removesuffix("/v1")
        self.repositories: dict[str, Stored] = {}

    def _respond(self, address: str, headers: Message, body: bytes) -> tuple[Any, ...]:
        path, token = unquote(urlsplit(address).path), headers["Authorization"].removeprefix("Bearer ")
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body), token)
        owner, name, *what = path.removeprefix("/api/models/").split("/")
        stored = self.repositories.get(f"{owner}/{name}")
        if stored is None:
            error = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return 404, {"error": "Repository not found"}, error
        if what[:1] == ["preupload"]:
            more = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{**file, **more} for file in json.loads(body)["files"]]
            return 200, {"files": files}
        if what[:1] == ["tree"]:
            files = [{"type": "file", "path": path, "size": 1, "oid": ""} for path in stored.files]
            return 200, files
        if what[:1] == ["commit"]:
            return self._commit(stored, [json.loads(line) for line in body.splitlines()])
        return 200, {"id": f"{owner}/{name}", "private": stored.private, "siblings": [], "tags": []}

    def _create(self, asked: dict[str, Any], token: str) -> tuple[Any, ...]:
        name = f"{asked['organization']}/{asked['name']}"
        if token != WRITER or asked["organization"] != "me":
            return 403, {
                "error": f"You don't have the rights to create a model under {asked['organization']}"
            }
        if name in self.repositories:
            return 409, {"error": "You already created this", "url": f"{self.address}/{name}"}
        self.repositories[name] = Stored(asked.get("private", asked.get("visibility") == "private"))
        return 200, {"url": f"{self.address}/{name}", "name": name}

    def _commit(self, stored: Stored, operations: list[dict[str, Any]]) -> tuple[Any, ...]:
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "header":
                stored.commits.append(value["summary"])
            elif operation["key"] == "file":
                stored.files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                del stored.files[value["path"]]
        url = f"{self.address}/me/sums/commit/{'0' * 40}"
        return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": url}
