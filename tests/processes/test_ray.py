"""Runners on a real Ray cluster of three nodes, one of which is killed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import load_config
from etude.core.call import ChatRequest, Completion
from etude.engines.programs import Program
from etude.preflight.check import check_config
from etude.processes.head import RemoteRunner
from etude.processes.ray_nodes import RayChild, RayLauncher
from tests.processes.nodes import start_cluster
from tests.processes.playing import evaluate, examples, read_run
from tests.support import EchoEngine

pytest.importorskip("ray")

AGENT = """
import asyncio
import etude

@etude.workflow
async def play(example, episode):
    question = [{"role": "user", "content": example.inputs["question"]}]
    first = await episode.chat(question)
    await asyncio.sleep(0.05)
    second = await episode.chat([*question, first.message, {"role": "user", "content": "and then?"}])
    return second.text

@etude.evaluator
def length(example, output):
    return float(len(output))
"""

CONFIG = """
llms: {policy: {_type: openai, model_name: none, base_url: "http://127.0.0.1:9"}}
workflow: agent_beside_config:play
eval:
  general: {dataset: examples.jsonl, max_concurrency: 6}
  evaluators: {length: agent_beside_config:length}
finetuning: {error_budget: 1.0, seed: 7}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with start_cluster(2, 2) as nodes:
        yield nodes


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "agent_beside_config.py").write_text(AGENT)
    (tmp_path / "project" / "examples.jsonl").write_text('{"id": "a", "question": "b", "do": ""}\n')
    (tmp_path / "project" / "config.yml").write_text(CONFIG)
    return tmp_path / "project" / "config.yml"


@pytest.mark.slow
async def test_a_node_that_is_lost_costs_nothing_but_time(
    tmp_path: Path, config_file: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
):
    """All episodes finish with the answers of one process, and no answered call is asked again."""
    on_ray = ["cluster._type=ray", f"cluster.address={cluster.address}", "cluster.runners=2"]
    work = examples(*[""] * 24)
    await evaluate(tmp_path / "here", load_config(config_file), EchoEngine(), work)

    class Watching(EchoEngine):
        async def complete(self, request: ChatRequest) -> Completion:
            await both.wait()
            if len(self.requests) == 14:
                lost.append(asyncio.ensure_future(asyncio.to_thread(cluster.remove_node, doomed)))
            return await super().complete(request)

    launch, launched = RayLauncher.launch, []

    async def note(self: RayLauncher, program: Program, log: Path) -> RayChild:
        launched.append(log)
        return await launch(self, program, log)

    monkeypatch.setattr(RayLauncher, "launch", note)
    build, built, both = RemoteRunner.build, [], asyncio.Event()

    async def count(self: RemoteRunner, parameters: dict[str, Any]) -> None:
        await build(self, parameters)
        built.append(self)
        if len(built) == 2:
            both.set()

    monkeypatch.setattr(RemoteRunner, "build", count)
    lost: list[asyncio.Future[Any]] = []
    doomed = sorted(cluster.worker_nodes, key=id)[0]
    config = load_config(config_file, on_ray)
    output = await evaluate(tmp_path / "there", config, Watching(log=tmp_path / "sampled"), work)
    await lost[0]
    assert output.failures == {}
    assert len(launched) == 3
    assert read_run(tmp_path / "there")[0] == read_run(tmp_path / "here")[0]
    sampled = (tmp_path / "sampled").read_text().split()
    assert len(sampled) == len(set(sampled)) == 48


@pytest.mark.slow
async def test_a_check_says_what_the_cluster_has(config_file: Path, cluster: Any):
    config = load_config(config_file, ["cluster._type=ray", f"cluster.address={cluster.address}"])
    findings, _ = await check_config(config)
    fine = next(each for each in findings.items if each.what == "cluster")
    assert (fine.status, "nodes of Ray with" in fine.detail) == ("ok", True)
