"""Who is let into a vLLM: the middleware in an application like vLLM's, over real HTTP."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

import etude.inference

PATHS = ("/health", "/v1/completions", "/invocations", "/collective_rpc", "/metrics")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """As vLLM imports it: from the module path, with the key in the environment."""
    monkeypatch.syspath_prepend(Path(etude.inference.__file__).parent / "vllm_gate")
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    monkeypatch.delitem(sys.modules, "etude_vllm_gate", raising=False)
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in PATHS])
    app.add_middleware(importlib.import_module("etude_vllm_gate").Gate)
    return TestClient(app)


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("answered")


@pytest.mark.parametrize("shown", [None, "", "the key", "Bearer", "Bearer another", "bearer the key"])
def test_only_health_is_told_without_the_key(client: TestClient, shown: str | None):
    headers = {} if shown is None else {"authorization": shown}
    answers = {path: client.post(path, headers=headers).status_code for path in PATHS}
    assert answers == {path: 200 if path == "/health" else 401 for path in PATHS}


def test_with_the_key_all_is_answered(client: TestClient):
    headers = {"authorization": "Bearer the key"}
    assert {client.get(path, headers=headers).text for path in PATHS} == {"answered"}
