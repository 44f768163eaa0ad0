"""A real server process, and the official client for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.process import ServerProcess
from tests.vllm import choose_command


def _tiny(folder: Path, hidden_size: int) -> Path:
    """A model folder: a tiny Llama that talks nonsense, the same each time."""
    from etude.models.tiny import TinyShape, build_policy, build_tokenizer

    tokenizer = build_tokenizer(["what is 1 + 2? it is 3. yes or no? yes, no."], vocab_size=300)
    shape = TinyShape(hidden_size=hidden_size, heads=2, intermediate_size=48, max_context=128)
    build_policy(tokenizer, 0, shape).export(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tiny(tmp_path_factory.mktemp("models") / "tiny", 32)


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that most tests share."""
    with ServerProcess(model, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


@pytest.fixture
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return shlex.join(choose_command(request.param, monkeypatch))


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads as wide as vLLM wants them."""
    return _tiny(tmp_path_factory.mktemp("vllm-server") / "tiny", 64)
