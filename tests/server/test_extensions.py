"""The seam for extensions: routes and names for models that the server itself knows nothing of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi import APIRouter, Request
from starlette.testclient import TestClient

from etude.core.errors import RequestError
from etude.server import extensions, guard
from etude.server.backend import Backend
from etude.server.extensions import ServerParts, register_server_extension
from etude.server.models import Alias
from etude.server.serve import create_app
from etude.server.settings import server_settings

KEY = {"authorization": "Bearer secret"}


class Names:
    """`newest` is another name for the server's own model."""

    def aliases(self, connection: sa.Connection) -> Mapping[str, Alias]:
        return {"newest": Alias("base", 7.0), "gone": Alias("deleted", 7.0)}

    def served_under(self, connection: sa.Connection, name: str) -> str | None:
        return "base" if name == "newest" else None


class Extension:
    large_paths = frozenset({"/large"})
    names = Names()

    def routes(self, parts: ServerParts) -> Sequence[APIRouter]:
        router = APIRouter()

        @router.get("/open")
        def served() -> str:
            return parts.models.base.name

        @router.post("/large")
        @router.post("/small")
        async def size(request: Request) -> int:
            return len(await request.body())

        return [router]

    def tells_tokens(self, name: str) -> bool:
        return False


class NoEngine(Backend):
    """Never samples."""

    name = "none"

    async def open(self) -> None: ...

    async def load(self, model: Any) -> Any:
        return object()

    async def unload(self, model: Any, engine: Any) -> None: ...


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(extensions, "_paths", [])
    for _ in range(2):
        register_server_extension("tests.server.test_extensions:Extension")
    monkeypatch.setattr(guard, "USUAL_BODY", 1024)
    settings = server_settings(model="m", name="base", data_dir=tmp_path, api_key="secret", max_file=4096)
    with TestClient(create_app(settings, NoEngine())) as running:
        yield running


def test_routes_are_served_and_paths_large_as_the_extension_says(client: TestClient) -> None:
    assert client.get("/open", headers=KEY).json() == "base"
    assert client.post("/large", content=b"x").status_code == 401
    assert client.post("/large", content=b"x" * 2000, headers=KEY).json() == 2000
    assert client.post("/small", content=b"x" * 2000, headers=KEY).status_code == 413


def test_models_are_found_and_listed_under_an_extensions_names(client: TestClient) -> None:
    listed = client.get("/v1/models", headers=KEY).json()["data"]
    assert {model["id"]: model["created"] for model in listed}["newest"] == 7
    assert "gone" not in {model["id"] for model in listed}
    assert client.get("/v1/models/newest", headers=KEY).json()["id"] == "newest"
    assert client.get("/v1/models/other", headers=KEY).status_code == 404


def test_an_extension_that_cannot_be_imported_is_an_error_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "_paths", ["no_such_module:Extension"])
    settings = server_settings(model="m", name="base", data_dir=tmp_path)
    with pytest.raises(RequestError, match=r"no_such_module:Extension.*cannot be loaded"):
        create_app(settings, NoEngine())
