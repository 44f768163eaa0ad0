"""vLLM processes on the nodes of a real Ray cluster, of which one is killed, and one with its node."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from etude.core.errors import EngineError
from etude.engines.vllm_engine import VllmProcesses
from etude.engines.vllm_process import VllmOptions, VllmProcess
from etude.processes.ray_cluster import connect_ray
from etude.processes.ray_nodes import RayChild, RayLauncher
from tests.engines.test_vllm import make_options
from tests.engines.test_vllm_processes import answers, ask, make_engine
from tests.engines.test_vllm_processes import lora as lora
from tests.engines.test_vllm_processes import source as source
from tests.support import is_alive, until

pytest.importorskip("ray")

pytestmark = pytest.mark.slow

_SECONDS = 240.0
"""A busy machine takes a minute to start an actor."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connection(cluster: Any) -> AsyncIterator[None]:
    """Of this process with the cluster; not from the main thread, as in a server."""
    connection = connect_ray(cluster.address, None)
    await asyncio.to_thread(connection.__enter__)
    yield
    await asyncio.to_thread(connection.__exit__, None, None, None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(
    connection: None, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmProcesses]:
    """Two processes, each on a node of its own."""
    folder = tmp_path_factory.mktemp("placed")
    processes = VllmProcesses([on_ray(folder / str(number)) for number in range(2)])
    await processes.start(str(source))
    yield processes
    await processes.stop()


def on_ray(folder: Path, *, cpus: float = 1.0, **changes: Any) -> VllmProcess:
    options: VllmOptions = replace(make_options(folder), arguments=("--echo",), **changes)
    return VllmProcess(options, RayLauncher(cpus, 0.0, seconds=options.start_seconds))


def list_nodes(processes: VllmProcesses) -> list[str]:
    """The nodes that they are on, as Ray names them."""
    children = [process._child for process in processes.processes]
    return [child.node_id for child in children if isinstance(child, RayChild)]


def read_command_lines(processes: VllmProcesses) -> str:
    """Their command lines, which all users of a machine can read."""
    return "".join(Path(f"/proc/{each.pid}/cmdline").read_text() for each in processes.processes)


@pytest.mark.asyncio(loop_scope="module")
async def test_each_is_on_a_node_of_its_own_and_lets_nobody_in_without_the_key(two, source):
    assert len(set(list_nodes(two))) == 2
    engine = make_engine(two, source, source)
    shares = await answers(engine, two)
    assert sum(shares) == 12 and min(shares) >= 4
    assert all(row["node"] for row in two.status()["processes"])
    assert two.processes[0].key.get_secret_value() not in read_command_lines(two)
    async with httpx.AsyncClient() as http:
        for process in two.processes:
            assert process.where in process.base_url
            assert (await http.post(f"{process.base_url}/v1/completions", json={})).status_code == 401
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_one_that_is_killed_comes_back_with_the_version_before_it_is_asked(two, source, lora):
    """Weights are sent to its node's disk; they are loaded before the first call, and gone when dropped."""
    await two.add_lora("lora-1", lora)
    engine, killed = make_engine(two, "lora-1", source), two.processes[0]
    pid = killed.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_alive(pid))
    assert await answers(engine, two) == [0, 12]
    await two.add_lora("lora-2", lora)
    newest = make_engine(two, "lora-2", source)
    await until(lambda: killed.restarts == 1 and killed.state == "running", _SECONDS)
    await asyncio.gather(*(ask(each, f"new {number}") for each in (engine, newest) for number in range(8)))
    assert two.processes[0].answered >= 2 and two.processes[0].failed <= 12
    async with httpx.AsyncClient() as http:
        environment = (await http.get(f"{killed.base_url}/environment", headers=killed.headers)).json()
    assert environment["VLLM_API_KEY"] == killed.key.get_secret_value()
    await two.remove_lora("lora-1")
    await two.remove_lora("lora-2")
    await asyncio.gather(engine.close(), newest.close())


@pytest.mark.asyncio(loop_scope="module")
async def test_one_whose_node_is_killed_comes_back_elsewhere_with_its_weights(two, source, lora, cluster):
    await two.add_lora("lora-3", lora)
    engine = make_engine(two, "lora-3", source)
    before, restarts = set(list_nodes(two)), [each.restarts for each in two.processes]
    doomed = next(node for node in cluster.worker_nodes if node.node_id in before)
    await asyncio.to_thread(cluster.remove_node, doomed, False)
    await until(lambda: [each.restarts for each in two.processes] != restarts, _SECONDS)
    lost = next(each for each, count in zip(two.processes, restarts, strict=True) if each.restarts > count)
    assert sum(await answers(engine, two)) == 12, "the other one answers meanwhile"
    assert "with its actor" in lost.reason
    spare = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    await until(lambda: lost.state == "running", _SECONDS)
    assert spare.node_id in list_nodes(two) and doomed.node_id not in list_nodes(two)
    await asyncio.gather(*(ask(engine, f"back {number}") for number in range(8)))
    await two.remove_lora("lora-3")
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_placed_or_found_is_said(two, tmp_path):
    crowded = on_ray(tmp_path / "crowded", cpus=64.0, start_seconds=1.0)
    with pytest.raises(EngineError, match=r"no room .* 64 CPUs and 0 GPUs .* 1 s"):
        await crowded.start("some/model")
    broken = on_ray(tmp_path / "broken", cpus=0.0)
    broken.options = replace(broken.options, arguments=("--fail",))
    with pytest.raises(EngineError, match=r"code 1[\s\S]*KV cache"):
        await broken.start("some/model")
