"""The client half against a real server process: what the stand-in claims is what the server does."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.backends.lm_client import LanguageModelClient
from etude.backends.openai_adapters import LmServerAdapter, LmServerAdapterConfig
from etude.backends.openai_api import connect
from etude.config.finetuning import FinetuneConfig
from etude.core.job import TrainingJobRef, TrainingStatusEnum
from etude.inference.openai_config import OpenAiLlmConfig
from etude.models.tiny import build_policy, build_tokenizer
from etude.store.learned import trained_samples
from etude.store.outline import outlines
from etude.store.run_folder import RunFolder
from tests.backends.test_openai_jobs import supervised
from tests.cli.projects import change, etude, local_project, process

pytest.importorskip("etude.server", reason="the server is not part of this build")

KEY = "sk-of-the-server"


class Server:
    """`etude serve` with a tiny model, in a process that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self._process: subprocess.Popen[str] | None = None
        build_policy(build_tokenizer(["t0?", "v0?", "0123456789"], splits=["[0-9]"]), 0).export(
            folder / "base"
        )

    def start(self) -> None:
        """Start, and wait until it serves."""
        arguments = ["serve", "base", "--name", "policy", "--port", self.url.rpartition(":")[2] or "0"]
        environment = {"SERVER_KEY": KEY}
        self._process = process(
            *arguments,
            *("--api-key-env", "SERVER_KEY", "--data-dir", "data"),
            folder=self.folder,
            environment=environment,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "serving policy at" in line, line + self._process.communicate()[1]
        self.url = line.split()[3].rstrip(";").removesuffix("/v1")

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, and wait for the end."""
        assert self._process is not None
        self._process.send_signal(sent)
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("server"))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Path:
    """The current folder, with a config that samples and trains at the server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVER", server.url)
    monkeypatch.setenv("SERVER_KEY", KEY)
    config = local_project(tmp_path, server.folder / "base")
    policy = {"_type": "openai", "provider": "etude", "model_name": "policy", "max_tokens": 8}
    adapter = {"_type": "lm_server", "hyperparameters": {"learning_rate": 3e-3, "lora_rank": 0}}
    change(
        config,
        llms={"policy": {**policy, "base_url": "${SERVER}/v1", "api_key": "${SERVER_KEY}"}},
        trainer_adapters={"server": adapter},
        trainers={"epochs": {"_type": "epochs", "poll_interval": 0.1}},
        finetuning__num_epochs=1,
    )
    return config


def adapter_of(server: Server, **settings: object) -> LmServerAdapter:
    llm = OpenAiLlmConfig(model_name="policy", base_url=f"{server.url}/v1", api_key=KEY)
    config = LmServerAdapterConfig(**settings)
    client = connect(config, llm, needs_key=False)
    return LmServerAdapter(config, client, LanguageModelClient(server.url, KEY), "policy")


def test_a_run_trains_there(project):
    grpo = {"_type": "grpo", "num_generations": 4}
    change(project, trajectory_builders={"made": grpo}, trainer_adapters__server__free_engine=True)
    # The server is shared, and a job's name is taken there once and for all.
    shown = etude("train", "config.yml", "--name", "grpo")
    assert shown.exit_code == 0, shown.stderr
    summary = json.loads(Path("runs/grpo/summary.json").read_text())
    assert summary["last_version"]["location"].startswith("ft:policy:grpo-epoch-1:")
    (job,) = json.loads(etude("jobs", "grpo", "--json").stdout)
    assert (job["status"], job["backend"]) == ("completed", "lm_server")
    assert job["metrics"]["trained_tokens"] > 0
    with RunFolder.read(Path("runs/grpo")) as run:
        episodes = [each.id for each in outlines(run.journal, "train/1/", None)]
        samples = [
            sample for id in episodes for sample in trained_samples(run.path, run.journal, id, "train/1")
        ]
    assert samples
    assert {sample.source.backend for sample in samples} == {"lm_server"}


async def test_the_client_and_the_server_agree(server):
    client = LanguageModelClient(server.url, KEY)
    await client.wait_for_ready(timeout=60)
    await client.stop_engine()
    await client.stop_engine()
    assert (await client.get_engine_status()).status == "stopped"
    assert (await client.start_engine()).status == "running"
    await client.close()


async def test_a_job_that_is_submitted_twice_is_made_once(server):
    data = supervised("s", rows=2)
    first = await adapter_of(server).submit(data)
    assert await adapter_of(server).submit(data) == first
    adapter = adapter_of(server)
    await adapter.initialize(FinetuneConfig())
    status = await adapter.wait_until_complete(
        TrainingJobRef(run_id=data.run_id, backend="lm_server"), poll_interval=0.1
    )
    assert status.status is TrainingStatusEnum.COMPLETED, status.message


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_trains_goes_on_and_so_does_the_run(project, server):
    # The job may be over before the kill; then it is the samples that have to wait for the server.
    change(project, llms__policy__max_retries=40)
    train = process("train", "config.yml", "--name", "killed", folder=project.parent)
    log = project.parent / "runs" / "killed" / "lm_server_jobs.jsonl"
    while train.poll() is None and not (log.exists() and "Created fine-tuning job" in log.read_text()):
        time.sleep(0.05)
    server.stop(signal.SIGKILL)
    server.start()
    _, errors = train.communicate(timeout=120)
    assert train.returncode == 0, errors
