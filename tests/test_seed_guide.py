"""The components of the toolkit's guide train, whatever they know of Etude."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from etude import EvalOutput, EvaluationRunOutput, TrajectoryCollection
from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.grpo import Grpo
from etude.config.load import load_config, resolved_yaml
from etude.core.errors import ConfigError, TrainingError
from etude.run import Run
from etude.verbs import new_run, train_in
from tests.cli.projects import succeed
from tests.support import ScriptedEngine

EPOCHS, GENERATIONS, EXAMPLES = 3, 4, 10
GROUPS = 3
"""The groups that the config's curriculum leaves of ten at the start."""


class TrainingServer:
    """The remote: takes jobs, and has each of them done at the second look."""

    def __init__(self) -> None:
        self.jobs: dict[str, list[dict[str, Any]]] = {}
        self.looks: dict[str, int] = {}
        self.keys: set[str] = set()
        self.healthy = True

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.add(request.headers["Authorization"])
        if request.url.path == "/health":
            return httpx.Response(200 if self.healthy else 503)
        job = request.url.path.removeprefix("/jobs/")
        if request.method == "POST":
            self.jobs[job] = json.loads(request.content)["rows"]
            return httpx.Response(201)
        if job not in self.jobs:
            return httpx.Response(404)
        self.looks[job] = self.looks.get(job, 0) + 1
        return httpx.Response(200, json={"status": "running" if self.looks[job] == 1 else "completed"})


@pytest.fixture
def server() -> TrainingServer:
    return TrainingServer()


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: TrainingServer) -> ModuleType:
    """The user's module, freshly imported; the current folder has the guide's config and its data."""
    monkeypatch.delitem(sys.modules, "tests.seed_guide", raising=False)
    module = importlib.import_module("tests.seed_guide")
    monkeypatch.setattr(module.MyTrainerAdapter, "transport", httpx.MockTransport(server))
    monkeypatch.setenv("TRAINING_API_KEY", "sk-training")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copy(Path(__file__).parent / "seed_guide.yml", "config.yml")
    Path("data").mkdir()
    rows = [
        {"id": f"q{number}", "question": f"question {number}", "answer": "yes"} for number in range(EXAMPLES)
    ]
    Path("data/train.json").write_text(json.dumps(rows))
    return module


def instant() -> ScriptedEngine:
    return ScriptedEngine(lambda request: ["yes", "no"][request.key % 2], slowly=True)


async def train(engine: ScriptedEngine, name: str = "guide") -> Run:
    config = load_config("config.yml", [f"finetuning.num_epochs={EPOCHS}"])
    with new_run(config, name) as run:
        return await train_in(config, run, engines={"my_model": engine})


def etude(*arguments: str) -> str:
    return succeed(*arguments, "--output-dir", ".tmp/finetuning/output").stdout


async def test_the_guides_components_train_with_its_config_on_other_data_in_every_epoch(guide, server):
    engine = instant()
    assert [status.status for status in (await train(engine)).jobs] == ["completed"] * EPOCHS
    assert server.keys == {"Bearer sk-training"}
    # Every episode was played: no call has the key of another.
    assert len({request.key for request in engine.requests}) == EPOCHS * GENERATIONS * EXAMPLES
    assert len(engine.requests) == EPOCHS * GENERATIONS * EXAMPLES
    # And no two answers that were trained on are the same sample, of one epoch or generation or another.
    assert [len(rows) for rows in server.jobs.values()] == [GROUPS * GENERATIONS] * EPOCHS
    logprobs = [tuple(row["logprobs"]) for rows in server.jobs.values() for row in rows]
    assert len(set(logprobs)) == EPOCHS * GROUPS * GENERATIONS
    for rows in server.jobs.values():
        assert len({row["group"] for row in rows}) == GROUPS
        assert all(len({row["group"] for row in rows[at : at + GENERATIONS]}) == 1 for at in range(0, 12, 4))

    # And what they did is in the files and on the command line.
    folder = Path(".tmp/finetuning/output/guide")
    lines = [json.loads(line) for line in (folder / "training_metrics.jsonl").read_text().splitlines()]
    assert [line["episodes"] for line in lines] == [EXAMPLES * GENERATIONS] * EPOCHS
    assert [line["filtered_trajectories"] for line in lines] == [GROUPS * GENERATIONS] * EPOCHS
    assert [line["percentile"] for line in lines] == [0.3] * EPOCHS
    for line in lines:
        figures = line["evaluators"]["my_reward"]
        assert line["avg_reward"] == pytest.approx(figures["mean"])
        assert figures["n"] == EXAMPLES * GENERATIONS
    assert len({line["avg_reward"] for line in lines}) == EPOCHS
    assert len(json.loads((folder / "reward_history.json").read_text())) == EPOCHS
    # The trainer's own file is its own affair.
    assert len((folder.parent / "my_progress.jsonl").read_text().splitlines()) == EPOCHS

    (listed,) = json.loads(etude("runs", "list", "--json"))
    assert (listed["name"], listed["state"]) == ("guide", "finished")
    assert listed["summary"]["epochs_trained"] == EPOCHS
    shown = json.loads(etude("runs", "show", "guide", "--json"))
    assert (shown["method"], shown["backend"]) == ("my_traj_builder", "my_trainer_adapter")
    assert f"{EPOCHS}/{EPOCHS}" in etude("runs", "show", "guide")
    jobs = json.loads(etude("jobs", "guide", "--json"))
    assert [(job["name"], job["status"]) for job in jobs] == [(name, "completed") for name in server.jobs]
    assert [job["trajectories"] for job in jobs] == [GROUPS * GENERATIONS] * EPOCHS


async def test_an_epoch_without_data_is_an_error_that_says_what_a_trainer_does_then(
    guide, server, monkeypatch
):
    monkeypatch.setattr(guide.MyTrajectoryBuilder, "parse", lambda self, item: [])
    with pytest.raises(TrainingError, match=r"too little data.*etude\.Skipped"):
        await train(instant())
    assert server.jobs == {}


async def test_an_unhealthy_training_server_is_refused_before_the_first_token(guide, server):
    server.healthy = False
    engine = instant()
    with pytest.raises(TrainingError, match=r"'my_trainer_adapter'.*healthy"):
        await train(engine)
    assert engine.requests == []


@pytest.mark.parametrize("shipped", [False, True])
async def test_the_guides_test_of_a_builder_passes_of_a_shipped_one_too(guide, shipped):
    config = guide.MyTrajectoryBuilderConfig(num_generations=2)
    builder = guide.MyTrajectoryBuilder(trajectory_builder_config=config)
    output = EvaluationRunOutput(evaluation_results=[("correct", EvalOutput())])
    if shipped:
        builder = CollectingBuilder(Grpo(num_generations=2))
    builder.run_eval = AsyncMock(return_value=output)
    await builder.start_run("test-run")
    assert "test-run" in builder.evaluation_runs
    await asyncio.sleep(0)
    assert isinstance(await builder.finalize("test-run"), TrajectoryCollection)


def test_a_plain_text_key_from_the_environment_stays_out_of_the_resolved_config(guide):
    written = resolved_yaml(load_config("config.yml"))
    assert "sk-training" not in written
    assert "api_key: ${TRAINING_API_KEY}" in written


def test_what_is_wrong_in_a_block_of_the_readers_own_is_told_with_its_place(guide, monkeypatch):
    for name in [name for name in os.environ if "KEY" in name]:
        monkeypatch.delenv(name)
    path = Path("config.yml")
    path.write_text(path.read_text().replace("batch_size: 8", "batchsize: 8").replace("1e-5", "fast"))
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    key, rate, size = str(raised.value).splitlines()
    assert key.startswith("config.yml:34:7: ") and "'TRAINING_API_KEY' is not set" in key
    assert rate.startswith("config.yml:35:7: ") and "number, found 'fast'" in rate
    assert size.startswith("config.yml:36:7: ") and "did you mean 'batch_size'? Allowed: endpoint" in size
