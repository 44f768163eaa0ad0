"""Several vLLM processes that are asked as one, who is let into one, and the logs of child processes."""

import asyncio
import importlib
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

import etude.engines
from etude.core.call import Completion
from etude.core.errors import EngineAway, EngineError
from etude.engines.programs import MaskedLog
from etude.engines.vllm_engine import VllmEngine, VllmProcesses
from etude.engines.vllm_process import VllmOptions, VllmProcess
from etude.models.text_codec import TextCodec
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from tests.engines.test_vllm import make_options
from tests.models.tiny_models import continuing
from tests.support import is_alive, until


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllms") / "tiny"
    shape = TinyShape(hidden_size=32, heads=2, intermediate_size=48, max_context=128)
    build_policy(build_tokenizer(["yes, no"], vocab_size=300), 1, shape).export(folder)
    return folder


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As far as the stand-in looks at it."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "adapter_config.json").write_text("{}")
    return folder


def options(folder: Path, count: int, *arguments: str) -> list[VllmOptions]:
    each = replace(make_options(folder), arguments=arguments or ("--echo",))
    return [
        replace(each, folder=folder / str(number), device=str(number), environment={"DEVICE": str(number)})
        for number in range(count)
    ]


def together(each: list[VllmOptions]) -> VllmProcesses:
    return VllmProcesses([VllmProcess(own) for own in each])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(source: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmProcesses]:
    """Two processes that several tests ask."""
    processes = together(options(tmp_path_factory.mktemp("two"), 2))
    await processes.start(str(source))
    yield processes
    await processes.stop()


def make_engine(processes: VllmProcesses, name: str | Path, source: Path, wait: float = 60) -> VllmEngine:
    return VllmEngine(processes, str(name), TextCodec.load(source), max_tokens=4, wait=wait)


async def ask(engine: VllmEngine, episode: str, **fields: object) -> Completion:
    return await engine.sample(continuing((5, 40, 41), conversation=episode, **fields))


async def answers(engine: VllmEngine, processes: VllmProcesses) -> list[int]:
    """How many of the episodes' calls each process answers."""
    before = [process.answered for process in processes.processes]
    await asyncio.gather(*(ask(engine, f"train/0/{number}") for number in range(12)))
    return [each.answered - count for each, count in zip(processes.processes, before, strict=True)]


async def environments(processes: VllmProcesses) -> list[dict[str, str]]:
    async with httpx.AsyncClient() as http:
        urls = [f"{process.base_url}/environment" for process in processes.processes]
        return [(await http.get(url)).json() for url in urls]


@pytest.mark.asyncio(loop_scope="module")
async def test_conversations_are_shared_out_and_each_process_has_its_device(two, source):
    engine = make_engine(two, source, source)
    first = await answers(engine, two)
    assert sum(first) == 12 and min(first) >= 4
    assert await answers(engine, two) == first, "they stay"
    assert [each["DEVICE"] for each in await environments(two)] == ["0", "1"]
    rows = two.status()["processes"]
    assert [(row["device"], row["process"], row["answers"]) for row in rows] == [
        (str(number), "running", 2 * first[number]) for number in range(2)
    ]
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_process_costs_no_call_and_comes_back_with_its_weights(two, source, lora):
    await two.add_lora("lora-1", lora)
    engine = make_engine(two, "lora-1", source)
    before = await answers(engine, two)
    killed = two.processes[0]
    pid = killed.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_alive(pid))
    assert sum(await answers(engine, two)) == 12  # Some by the killed one, if it is back by then.
    await until(lambda: killed.restarts == 1 and killed.state == "running")
    assert two.processes[0].failed <= before[0]
    assert [each["DEVICE"] for each in await environments(two)] == ["0", "1"]
    answered = two.processes[0].answered
    newcomers = await asyncio.gather(*(ask(engine, f"new {number}") for number in range(8)))
    assert len(newcomers) == 8 and two.processes[0].answered == answered + 4
    await two.remove_lora("lora-1")
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_weights_that_a_process_does_not_take_are_taken_from_none(two, source, lora):
    engine = make_engine(two, "lora-2", source)
    async with httpx.AsyncClient() as http:
        await http.post(f"{two.processes[1].base_url}/refuse", json={"reason": "out of memory"})
        with pytest.raises(EngineError, match="out of memory"):
            await two.add_lora("lora-2", lora)
    with pytest.raises(EngineError, match="404"):
        await ask(engine, "gone")
    await engine.close()


async def test_a_process_that_does_not_start_stops_the_others(source, tmp_path):
    each = options(tmp_path, 2)
    processes = together([each[0], replace(each[1], arguments=("--fail",))])
    with pytest.raises(EngineError, match="room for the KV cache"):
        await processes.start(str(source))
    assert processes.processes[0].pid is None
    engine = make_engine(processes, source, source)
    with pytest.raises(EngineAway, match="is not running"):
        await ask(engine, "stopped")
    await engine.close()


PATHS = ("/health", "/v1/completions", "/invocations", "/collective_rpc", "/metrics")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """As vLLM imports it: from the module path, with the key in the environment."""
    monkeypatch.syspath_prepend(Path(etude.engines.__file__).parent / "vllm_gate")
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    monkeypatch.delitem(sys.modules, "etude_vllm_gate", raising=False)
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in PATHS])
    app.add_middleware(importlib.import_module("etude_vllm_gate").Gate)
    return TestClient(app)


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("answered")


@pytest.mark.parametrize("shown", ["", "the key", "Bearer", "Bearer another", "bearer the key"])
def test_only_health_is_told_without_the_key(client: TestClient, shown: str):
    answers = {path: client.post(path, headers={"authorization": shown}).status_code for path in PATHS}
    assert answers == {path: 200 if path == "/health" else 401 for path in PATHS}
    assert client.get(PATHS[1]).status_code == 401
    assert client.get(PATHS[1], headers={"authorization": "Bearer the key"}).text == "answered"


SECRET = "canary-8fJ2kd93hQ"


async def log_of_program(path: Path, code: str) -> tuple[bytes, int]:
    """The lines that a program with this code has left in its log, and where the log began."""
    with MaskedLog(path) as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=log.fileno(), stderr=log.fileno()
        )
    await asyncio.wait_for(process.wait(), 60)
    await log.wait()
    return await asyncio.to_thread(path.read_bytes), log.begin


async def test_secrets_are_masked_and_all_else_is_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    path = tmp_path / "child.log"
    path.write_bytes(b"before\n")
    code = """
import os, sys
os.write(1, b"key " + os.environ["SOME_API_KEY"][:5].encode())
os.write(1, os.environ["SOME_API_KEY"][5:].encode() + b" end\\n")
os.write(2, b"10 %\\r\\xff odd\\n" + b"no newline")
"""
    log, begin = await log_of_program(path, code)
    assert log == b"before\nkey ********** end\n10 %\r\xff odd\nno newline"
    assert begin == 7


async def test_a_child_that_nobody_reads_goes_on(tmp_path: Path):
    """More than a pipe holds, while the event loop stands still."""
    with MaskedLog(tmp_path / "child.log") as log:
        code = "print('x' * 100, flush=True)\n" * 5000
        process = await asyncio.create_subprocess_exec(sys.executable, "-", stdin=-1, stdout=log.fileno())
    await asyncio.wait_for(process.communicate(code.encode()), 60)
    await log.wait()
    assert (tmp_path / "child.log").stat().st_size == 101 * 5000
    assert stat.S_IMODE((tmp_path / "child.log").stat().st_mode) == 0o600
