"""`etude serve --engine vllm`: jobs make LoRA weights and whole models, and vLLM answers with them."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.server.backend import Backend
from etude.server.engines import MAX_QUEUE, EnginePool
from etude.server.models import ServedModel
from etude.server.settings import server_settings
from etude.wire.http_server import ApiError
from tests.cli.projects import etude
from tests.forked import Forked
from tests.server.data import ASK, YES, create, supervised_rows, upload, wait
from tests.server.process import ServerProcess
from tests.support import wait_until
from tests.vllm import STAND_IN, commands, list_vllms


@pytest.mark.slow
@commands
def test_vllm_answers_with_what_jobs_trained_and_comes_back_from_a_crash(
    wide: Path, tmp_path: Path, command: str
) -> None:
    options = ["--engine", "vllm", "--vllm-command", command, "--vllm-arg=--enforce-eager"]
    with ServerProcess(wide, tmp_path, *options, "--engine-wait", "300") as server:
        client = server.client(timeout=300)

        def ask(model: str) -> str | None:
            answer = client.chat.completions.create(model=model, messages=[ASK], temperature=0, max_tokens=5)
            return answer.choices[0].message.content

        untrained = ask("tiny")
        assert untrained != YES["content"]
        hyper = {"n_epochs": 10, "batch_size": 4, "learning_rate": 0.02}
        file = upload(client, supervised_rows(8))
        for rank in (4, 0):  # LoRA weights beside the base model, then a whole model in its place.
            job = wait(client, create(client, file, lora_rank=rank, **hyper).id)
            assert job.fine_tuned_model is not None, job.error
            assert ask(job.fine_tuned_model) == YES["content"]
            assert ask("tiny") == untrained
            if rank:
                lora = job.fine_tuned_model
        os.kill(list_vllms(server.pid)[0], signal.SIGKILL)
        with server.http(timeout=300) as http:
            wait_until(lambda: http.get("/engine/status").json()["restarts"])
            assert ask(lora) == YES["content"], "it waited for the restart"
            assert http.post("/engine/stop").json()["process"] == "stopped"
            assert http.post("/engine/start").json()["process"] == "running"
        assert ask(lora) == YES["content"]


@pytest.mark.slow
def test_sigterm_while_vllm_starts_ends_the_server_and_leaves_no_process(wide: Path, tmp_path: Path) -> None:
    options = ["--engine", "vllm", "--vllm-command", shlex.join(STAND_IN), "--vllm-arg=--slow"]
    options += ["--vllm-device", "0", "--vllm-device", "1"]
    command = ["serve", str(wide), "--port", "0", "--data-dir", str(tmp_path), *options]
    process = Forked(command, Path.cwd(), dict(os.environ), errors=tmp_path / "errors")
    deadline = time.monotonic() + 60
    while len(vllms := list_vllms(process.pid)) < 2:
        assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "errors").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=5)
    assert not any(Path(f"/proc/{pid}").exists() for pid in vllms)


def start_error(model: Path, folder: Path, *options: str) -> str:
    """Why a server does not start; in this process, as it does not."""
    done = etude("serve", model, "--port", 0, "--data-dir", folder, *options)
    assert done.exit_code
    return str(done.stderr)


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_model_whose_files_lack_a_weight_is_refused_at_the_start(
    model: Path, tmp_path: Path, engine: str
) -> None:
    """Before vLLM is started, which would serve some of them."""
    shutil.copytree(model, tmp_path / "half")
    config = json.loads((tmp_path / "half" / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "half" / "config.json").write_text(json.dumps(config))
    options = ["--engine", engine, "--device", "cpu"]
    options += ["--vllm-command", shlex.join(STAND_IN)] if engine == "vllm" else []
    assert "have no lm_head.weight" in start_error(tmp_path / "half", tmp_path, *options)


class Slow(Backend):
    """Takes its time to load a model: twice an engine's wait, and so ends when that does."""

    name = "slow"

    async def open(self) -> None:
        pass

    async def load(self, model: ServedModel) -> Any:
        await asyncio.sleep(1.0)
        return model.name

    async def unload(self, model: ServedModel, engine: object) -> None:
        pass


class Models:
    """Knows any model."""

    base = ServedModel("tiny", 0.0)

    def get(self, name: str) -> ServedModel:
        return replace(self.base, name=name)


async def test_a_model_that_is_loaded_is_waited_for_while_the_queue_has_room(tmp_path: Path) -> None:
    settings = server_settings(model="m", name="tiny", data_dir=tmp_path, engine_wait=0.5, max_models=1)
    pool = EnginePool(settings, Models(), Slow())  # type: ignore[arg-type]
    async with pool.use_engine("new", 1) as engine:
        assert str(engine) == "new"
        with pytest.raises(ApiError, match="busy"):
            async with pool.use_engine("tiny", 1):
                pass
    async with pool.use_engine("tiny", 1) as engine:
        assert str(engine) == "tiny"
        with pytest.raises(ApiError, match="the server takes 4096 at once") as caught:
            async with pool.use_engine("tiny", MAX_QUEUE):
                pass
    assert caught.value.status_code == 429 and caught.value.code == "queue_full"


async def test_models_that_make_room_for_each_other_all_answer(tmp_path: Path) -> None:
    settings = server_settings(model="m", name="tiny", data_dir=tmp_path, max_models=1)
    pool = EnginePool(settings, Models(), Slow())  # type: ignore[arg-type]

    async def ask(name: str) -> None:
        async with pool.use_engine(name, 1):
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        await asyncio.gather(*map(ask, "abcabcabc"))


def test_a_vllm_that_is_not_there_ends_the_command(wide: Path, tmp_path: Path) -> None:
    options = ["--engine", "vllm", "--vllm-command", "no-such-vllm"]
    assert "'no-such-vllm' cannot be started" in start_error(wide, tmp_path, *options)
