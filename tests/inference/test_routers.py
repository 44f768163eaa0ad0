"""A router as the address of a model: vLLM's own where it is installed and named, and a stand-in always.

ETUDE_TEST_ROUTER=path/to/vllm-router pytest -m vllm tests/inference/test_routers.py
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.core.call import ChatRequest, Completion
from etude.inference.openai_compatible import OpenAiEngine
from etude.inference.openai_config import OpenAiLlmConfig
from tests.endpoint_process import EndpointProcess

EPISODES = [f"train/0/{number}" for number in range(24)]
REAL = "ETUDE_TEST_ROUTER"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[EndpointProcess]]:
    servers = [EndpointProcess("one"), EndpointProcess("two")]
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(params=["stand-in", "strict", pytest.param("real", marks=pytest.mark.vllm)])
def router(request: pytest.FixtureRequest, servers: list[EndpointProcess]) -> Iterator[str]:
    """Its address."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = free.getsockname()[1], other.getsockname()[1]
    behind = [server.url.removesuffix("/v1") for server in servers]
    if request.param == "real":
        if not (program := os.environ.get(REAL)):
            pytest.skip(f"{REAL} does not name a vllm-router")
        command = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        command += ["--policy", "consistent_hash", "--worker-urls", *behind]
    else:
        strict = ["--strict"] if request.param == "strict" else []
        command = [
            sys.executable,
            "-S",
            str(Path(__file__).parent / "routers.py"),
            *strict,
            str(port),
            *behind,
        ]
    for server in servers:
        server.behave("well", asked=[])
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/v1/models")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.URLError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.1)


@pytest.fixture
async def engine(router: str) -> AsyncIterator[OpenAiEngine]:
    settings: dict[str, Any] = {
        "model_name": "tiny",
        "base_url": router,
        "api_key": "sk-secret",
        "retry_wait": 0.01,
    }
    asked = {"provider": "vllm"}
    engine = OpenAiEngine(OpenAiLlmConfig.model_validate(settings | asked))
    yield engine
    await engine.close()


async def ask(engine: OpenAiEngine, episode: str) -> Completion:
    messages = (
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "well", "reasoning_content": "it greets"},
        {"role": "user", "content": "and?"},
    )
    return await engine.complete(ChatRequest(messages=messages, conversation=episode))


@pytest.mark.parametrize("router", ["stand-in", pytest.param("real", marks=pytest.mark.vllm)], indirect=True)
async def test_a_conversation_stays_at_one_server_and_all_fields_get_through(engine, servers):
    """The name of the conversation that the router sees tells nothing of the episode."""
    for _ in range(2):
        answers = await asyncio.gather(*(ask(engine, episode) for episode in EPISODES))
    assert all(answer.completion_ids == (7,) and answer.prompt_ids == (5,) for answer in answers)
    assert all(answer.logprobs == (-0.5,) for answer in answers)
    asked = [server.asked() for server in servers]
    assert min(map(len, asked)) >= 4
    sessions = [Counter(call["session"] for call in calls) for calls in asked]
    assert not sessions[0].keys() & sessions[1].keys(), "both calls of each went to one server"
    if None not in sessions[0]:
        assert set((sessions[0] + sessions[1]).values()) == {2}
        assert not any("train" in session for each in sessions for session in each)
    fields = asked[0][0]
    assert (fields["return_token_ids"], fields["logprobs"], fields["top_k"]) == (True, True, -1)
    assert fields["authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize("router", ["strict"], indirect=True)
async def test_a_router_that_drops_token_ids_can_be_sampled_from_and_not_trained_on(engine, router):
    answer = await ask(engine, "train/0/0")
    assert (answer.message["content"], answer.completion_ids) in {("one", None), ("two", None)}
    assert answer.logprobs == (-0.5,)
