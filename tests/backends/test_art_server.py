"""The adapter `openpipe_art` against a real `etude serve`, which answers as `art run` does."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from etude.config.finetuning import FinetuneConfig
from etude.core.call import ChatRequest, Sampling
from etude.core.job import TrainingJobStatus, TrainingStatusEnum
from etude.inference.openai_compatible import OpenAiEngine
from etude.inference.openai_config import OpenAiLlmConfig
from etude.integrations.art.adapter import ARTTrainerAdapter
from etude.integrations.art.client import ArtError, ArtInference
from etude.integrations.art.config import ARTTrainerAdapterConfig
from tests.backends.test_art_wire import collection, said
from tests.backends.test_real_server import KEY, Server

ASK = ChatRequest(({"role": "user", "content": "t0?"},), sampling=Sampling(max_tokens=2))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def adapter(
    server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[ARTTrainerAdapter]:
    config = ARTTrainerAdapterConfig(
        backend={
            "base_url": server.url,
            "name": request.node.name.replace("test_", ""),
            "base_model": "policy",
            "api_key": KEY,
            "delete_old_checkpoints": True,
        },
        training={"learning_rate": 1e-3, "beta": 0.05, "epsilon": 0.3},
        recover_wait=120.0,
    )
    address = f"{server.url}/v1"
    llm = OpenAiLlmConfig(model_name="policy", base_url=address, api_key=KEY, provider="etude")
    adapter = ARTTrainerAdapter(
        config,
        engine=OpenAiEngine(llm),
        inference=ArtInference(address, KEY, 60.0),
        folder=tmp_path,
    )
    await adapter.initialize(FinetuneConfig())
    yield adapter
    await adapter.cleanup()
    await adapter._engine.close()


async def train(adapter: ARTTrainerAdapter, name: str) -> TrainingJobStatus:
    groups = [[said("t0?", "yes"), said("t0?", "no", reward=0.0)] for _ in range(2)]
    data = collection(*groups).model_copy(update={"run_id": name})
    return await adapter.wait_until_complete(await adapter.submit(data))


def jobs_of(server: Server, model: str) -> list[str]:
    headers = {"authorization": f"Bearer {KEY}"}
    query = {"metadata[art_model]": model}
    found = httpx.get(f"{server.url}/v1/fine_tuning/jobs", params=query, headers=headers, timeout=60).json()
    return [job["status"] for job in found["data"]]


def wait_for_job(server: Server, model: str) -> None:
    while not jobs_of(server, model):
        time.sleep(0.05)


async def test_a_job_makes_the_step_that_is_sampled_next(adapter: ARTTrainerAdapter) -> None:
    base = await adapter._engine.complete(ASK)
    status = await train(adapter, "run-epoch-1")
    assert status.status is TrainingStatusEnum.COMPLETED, status.message
    made = status.metadata["model_version"]
    assert (made["number"], made["location"]) == (1, "a_job_makes_the_step_that_is_sampled_next@1")
    metrics = status.metadata["metrics"]
    assert metrics["gradient_steps"] == 1 and metrics["learning_rate"] == 1e-3 and "reference_kl" in metrics
    await adapter._engine.adopt(await adapter.current_version())
    now = await adapter._engine.complete(ASK)
    assert now.model_version == 1 and now.logprobs != base.logprobs
    await adapter.prune([await adapter.current_version()])
    assert await adapter.is_healthy()


async def test_an_option_that_the_server_lacks_fails_the_job_with_its_name(
    server: Server, tmp_path: Path, adapter: ARTTrainerAdapter
) -> None:
    training = adapter.adapter_config.training.model_copy(update={"mask_prob_ratio": True})
    adapter.remote_backend._config = adapter.adapter_config.model_copy(update={"training": training})
    status = await train(adapter, "run-epoch-1")
    assert status.status is TrainingStatusEnum.FAILED
    assert "dev_config.mask_prob_ratio" in str(status.message)


async def test_another_base_model_is_refused(adapter: ARTTrainerAdapter) -> None:
    adapter.remote_backend._model["base_model"] = "Qwen/Qwen2.5-7B-Instruct"
    with pytest.raises(ArtError, match="this server trains 'policy'"):
        await adapter.remote_backend.register()


@pytest.mark.slow
async def test_a_server_that_is_killed_while_it_trains_makes_the_step_once(
    server: Server, adapter: ARTTrainerAdapter
) -> None:
    name = adapter.adapter_config.backend.name
    task = asyncio.create_task(train(adapter, "run-epoch-1"))
    await asyncio.to_thread(wait_for_job, server, name)
    await asyncio.to_thread(server.stop, signal.SIGKILL)
    await asyncio.to_thread(server.start)
    status = await task
    assert status.status is TrainingStatusEnum.COMPLETED, status.message
    assert jobs_of(server, name) == ["succeeded"]
    assert await adapter.remote_backend.step() == 1
