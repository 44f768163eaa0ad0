"""A run on a Ray cluster tells where it is and what it prints; its secrets stay where they are used."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import load_config
from etude.core.errors import RequestError
from tests.processes.nodes import add_node, start_cluster
from tests.processes.playing import evaluate, examples
from tests.processes.test_places import Endpoint
from tests.processes.test_places import endpoint as endpoint
from tests.processes.test_status import wait_for_status
from tests.support import until

pytest.importorskip("ray")
pytestmark = pytest.mark.cluster

CANARY, CONTROL = "canary-8d1f07", "control-51ac9e"

AGENT = """
import asyncio
from pathlib import Path
import etude

@etude.workflow
async def play(example, episode):
    print("playing", example.id, flush=True)
    reply = await episode.chat([{"role": "user", "content": "control-51ac9e"}])
    while not Path("FOLDER/go").exists():
        await asyncio.sleep(0.1)
    print("x" * 3_000_000, flush=True)
    return reply.text

@etude.evaluator
def length(example, output):
    return float(len(output))
"""

CONFIG = """
llms: {policy: {_type: openai, model_name: m, base_url: "URL", api_key: "${CANARY_KEY}", logprobs: false}}
workflow: agent_on_a_node:play
eval:
  general: {dataset: examples.jsonl, max_concurrency: 2}
  evaluators: {length: agent_on_a_node:length}
finetuning: {error_budget: 1.0}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without the key in its environment, and a node that has it."""
    with start_cluster() as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY_KEY", CANARY)
        add_node(nodes, 1)
        patch.undo()
        yield nodes


@pytest.fixture
def config_file(tmp_path: Path, endpoint: Endpoint) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "agent_on_a_node.py").write_text(AGENT.replace("FOLDER", str(tmp_path)))
    (project / "examples.jsonl").write_text('{"id": "a", "question": "b"}\n')
    (project / "config.yml").write_text(CONFIG.replace("URL", endpoint.url))
    return project / "config.yml"


async def test_a_run_tells_where_it_is_and_its_key_is_nowhere(
    tmp_path: Path, config_file: Path, endpoint: Endpoint, cluster: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CANARY_KEY", CANARY)
    on_ray = ["cluster._type=ray", f"cluster.address={cluster.address}", "cluster.runners=1"]
    config, run = load_config(config_file, on_ray), tmp_path / "run"
    going = asyncio.ensure_future(evaluate(run, config, None, examples("", "")))
    try:
        await wait_for_status(run, lambda status: status.playing == 2 and status.runners[0].node)
        log = run / "runners" / "1.log"
        await until(lambda: log.exists() and "playing 1-" in log.read_text())
        assert not going.done()
        import ray
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(b"control", CONTROL.encode())
        held = ray.put(CONTROL.encode() * 20_000)
        found = {where for where, data in everywhere(cluster) if CANARY.encode() in data}
        controls = {where for where, data in everywhere(cluster) if CONTROL.encode() in data}
        del held
    finally:
        (tmp_path / "go").touch()
        await going
    assert found == set()
    assert controls == {"an object store", "the cluster's head"}
    assert endpoint.asked == [("m", f"Bearer {CANARY}")] * 2
    text = log.read_text()
    assert text.startswith("playing 0-")
    assert len(text) > 6_000_000
    assert files_with(CONTROL, run)
    session = Path(cluster.head_node.get_session_dir_path())
    assert files_with("", session)
    assert files_with(CANARY, run) + files_with(CANARY, session) == []


def files_with(text: str, folder: Path) -> list[Path]:
    """The files in a folder that hold a text."""
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def everywhere(cluster: Any) -> Iterator[tuple[str, bytes]]:
    """All that Ray holds: the objects of each node's store, and the memory of the cluster's head."""
    for node in cluster.list_all_nodes():
        raylet = node.all_processes["raylet"][0].process.pid
        for file in Path(f"/proc/{raylet}/fd").iterdir():
            if "plasma" in str(file.readlink()):
                yield "an object store", file.read_bytes()
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    with Path(f"/proc/{gcs}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{gcs}/maps").read_text().splitlines():
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if " rw" not in line or last - first > 2**30:
                continue
            memory.seek(first)
            try:
                yield "the cluster's head", memory.read(last - first)
            except OSError:
                continue


async def test_a_node_without_the_variable_is_named(
    tmp_path: Path, config_file: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTHER_KEY", CANARY)
    changes = ["cluster._type=ray", f"cluster.address={cluster.address}", "cluster.runners=1"]
    config = load_config(config_file, [*changes, "llms.policy.api_key=${OTHER_KEY}"])
    with pytest.raises(RequestError, match=r"lacks OTHER_KEY \(for llms\.policy\.api_key\)"):
        await evaluate(tmp_path / "run", config, None, examples(""))
