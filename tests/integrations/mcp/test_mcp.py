"""Tools of MCP servers in episodes: real servers, over standard streams and HTTP, that work or do not."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from etude.config.builder import Builder
from etude.config.load import load_config, parse_config
from etude.core.episode import EpisodeRecord
from etude.core.errors import ConfigError
from etude.integrations.mcp import source
from etude.preflight.check import check_config
from etude.rollout.collector import EpisodeJob, Limits
from etude.rollout.recorder import ToolCall
from etude.store.journal import Journal
from tests.forked import Forked, programs
from tests.rollout.running import collect, examples, jobs
from tests.rollout.test_episode_tools import to_call
from tests.support import ScriptedEngine, is_alive, pass_time, until

HERE = Path(__file__).parent
CALCULATOR = str(HERE / "calculator.py")
PLAIN = str(HERE / "plain_server.py")


@asynccontextmanager
async def open_builder(**keys: Any) -> AsyncIterator[Builder]:
    config = parse_config({"tools": {"server": {"_type": "mcp", **keys}}})
    async with Builder(config) as builder:
        yield builder


async def play(
    journal: Journal, workflow: Any, *, episodes: int = 1, phase: str = "train", **keys: Any
) -> list[EpisodeRecord]:
    work = [EpisodeJob(f"{phase}/{example.id}/0", example) for example in examples(episodes)]
    async with open_builder(**keys) as builder:
        tools = {"server": await builder.get_tools("server")}
        return await collect(workflow, journal, tools=tools, work=work, limits=Limits(timeout=60))


def calling(*calls: ToolCall) -> Any:
    async def workflow(example: Any, episode: Any) -> list[str]:
        async with episode.tools("server") as tools:
            return [message["content"] for message in await tools.call_all(calls)]

    return workflow


async def test_the_tools_of_a_server_are_described_called_and_recorded(journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> Any:
        async with episode.tools("server") as tools:
            [add] = [tool for tool in tools.schemas if tool["function"]["name"] == "add"]
            messages = await tools.call_all([to_call("add", left=index, right=1) for index in range(3)])
            wrong = await tools.call(to_call("add", left="many", right=1))
            secret = await tools.call(to_call("environment", name="SECRET"))
            return [add, *(message["content"] for message in messages), wrong["content"], secret["content"]]

    env = {"SECRET": "${MCP_TEST_SECRET:-sesame}"}
    [record] = await play(journal, workflow, command=str(programs() / "python"), args=[CALCULATOR], env=env)
    assert record.failure is None
    add, *sums, wrong, secret = record.output
    assert add["function"]["description"] == "Add two whole numbers."
    assert list(add["function"]["parameters"]["properties"]) == ["left", "right"]
    assert sums == ["1", "2", "3"] and secret == "sesame"
    assert "valid integer" in wrong
    uses = [event.tool for event in record.events if event.tool is not None]
    assert [(use.source, use.name, use.outcome) for use in uses] == [
        *[("server", "add", "ok")] * 3,
        ("server", "add", "error"),
        ("server", "environment", "ok"),
    ]
    assert all(use.seconds > 0 for use in uses)


async def test_a_server_that_dies_fails_its_episode_and_the_next_has_a_new_one(journal: Journal) -> None:
    async def workflow(example: Any, episode: Any) -> str:
        async with episode.tools("server") as tools:
            return str((await tools.call(to_call("die" if example.id == "0" else "odd")))["content"])

    async with open_builder(command="python", args=[PLAIN], scope="shared") as builder:
        tools = {"server": await builder.get_tools("server")}
        limits = Limits(max_concurrency=1)
        records = await collect(workflow, journal, tools=tools, work=jobs(2), limits=limits)
    dead, alive = records
    assert dead.failure is not None and (dead.failure.kind, dead.failure.origin) == ("tool_failed", "tool")
    assert "call 'die'" in dead.failure.reason
    assert "a meteor struck" in dead.failure.reason
    assert [event.tool.outcome for event in dead.events if event.tool is not None] == ["failed"]
    assert alive.output == "fine"


async def test_a_resumed_episode_has_its_results_and_its_own_server_is_where_it_was(journal: Journal) -> None:
    stop = True

    async def workflow(example: Any, episode: Any) -> list[str]:
        results = []
        async with episode.tools("server") as tools:
            for number in (1, 2):
                results.append((await tools.call(to_call("remember", number=number)))["content"])
            if stop:
                raise asyncio.CancelledError
            results.append((await tools.call(to_call("remember", number=10)))["content"])
        return results

    keys = {"command": "python", "args": [PLAIN]}
    [stopped] = await play(journal, workflow, **keys)
    assert stopped.failure is not None
    await journal.forget(stopped.id)
    stop = False
    [resumed] = await play(journal, workflow, **keys)
    assert resumed.output == ["1", "3", "13"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("dies at once", "no license key"),
        ("hangs at once", "tools within 1 s"),
        ("hangs", "within 0.5 s; raise tools.server.call_timeout"),
        ("no schema", "cannot be used: ValidationError"),
        ("answers with an error", "'odd' with the error -32603: out of coffee"),
        ("answers nonsense", "gave 'odd' no valid answer: ValidationError"),
    ],
)
async def test_a_broken_server_is_a_failure_with_its_cause(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setattr(source, "START_SECONDS", 1.0 if fault == "hangs at once" else 300.0)
    keys = {"command": "python", "args": [PLAIN, fault], "call_timeout": 0.5 if fault == "hangs" else 300}
    [record] = await play(journal, calling(to_call("odd")), **keys)
    assert record.failure is not None and record.failure.kind == "tool_failed", record
    assert reason in record.failure.reason


async def test_episodes_that_wait_for_a_shared_server_share_its_failure(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "START_SECONDS", 1.0)
    starts = tmp_path / "starts"
    command = f"echo x >> {starts}; exec {sys.executable} {PLAIN} 'hangs at once'"
    keys = {"command": "sh", "args": ["-c", command], "scope": "shared"}
    records = await play(journal, calling(to_call("odd")), episodes=4, **keys)
    assert [record.failure.kind for record in records if record.failure] == ["tool_failed"] * 4
    assert starts.read_text() == "x\n"


async def test_a_server_over_http_has_the_headers_and_may_be_gone(journal: Journal) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = Forked([CALCULATOR, str(port)], HERE, dict(os.environ), program="python")
    try:
        await until(lambda: is_listening(port))
        keys = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Key": "sesame"}, "scope": "shared"}
        calls = [to_call("meet", count=4), to_call("meet", count=8), to_call("add", left=1, right=1)]
        records = await play(journal, calling(*calls), episodes=4, **keys)
        assert [record.output for record in records] == [["met", "met", "2"]] * 4
    finally:
        process.kill()
        process.communicate()
    [record] = await play(journal, calling(to_call("add", left=2, right=1)), phase="later", **keys)
    assert record.failure is not None and record.failure.kind == "tool_failed"
    assert "All connection attempts failed" in record.failure.reason
    assert "sesame" not in record.failure.reason


def is_listening(port: int) -> bool:
    with socket.socket() as calling:
        return calling.connect_ex(("127.0.0.1", port)) == 0


async def test_servers_end_with_the_run_though_an_episode_was_stopped(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "START_SECONDS", 3000.0)
    pids = tmp_path / "pids"
    command = f"echo $$$$ >> {pids}; exec {sys.executable} {PLAIN} hangs"
    keys = {"command": "sh", "args": ["-c", command], "call_timeout": 3000}
    async with open_builder(**keys) as builder:
        tools = {"server": await builder.get_tools("server")}
        work = calling(to_call("odd"))
        limits = Limits(timeout=600)
        collecting = asyncio.create_task(collect(work, journal, tools=tools, work=jobs(1), limits=limits))
        await until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        pass_time(600)
        [record] = await collecting
    assert record.failure is not None and record.failure.kind == "timeout"
    [pid] = map(int, pids.read_text().split())
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "either a 'command' .*'url'"),
        ({"command": "python", "url": "http://localhost"}, "either a 'command'"),
        ({"url": "http://localhost", "args": ["x"]}, "go with a 'command'"),
        ({"command": "python", "headers": {"a": "b"}}, "go with a 'url'"),
    ],
)
def test_a_config_names_a_command_or_an_address(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config({"tools": {"server": {"_type": "mcp", **keys}}})


def add(left: int, right: int) -> int:
    return left + right


async def test_an_agent_of_a_server_needs_no_code_has_all_tools_and_runs_beside_its_config(
    journal: Journal, tmp_path: Path
) -> None:
    shutil.copy(PLAIN, tmp_path / "server.py")
    script = tmp_path / "serve.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} server.py\n")
    script.chmod(0o755)
    file = tmp_path / "config.yml"
    file.write_text(
        f"tools: {{sums: {{_type: functions, functions: ['{__name__}:add']}}}}\n"
        "workflow: {_type: mcp, command: ./serve.sh, only: [odd], scope: shared}"
    )
    asking = {"id": "call_0", "type": "function", "function": {"name": "odd", "arguments": "{}"}}
    engine = ScriptedEngine([{"role": "assistant", "content": None, "tool_calls": [asking]}, "It is fine."])
    config = load_config(file)
    async with Builder(config) as builder:
        agent, tools = await builder.get_workflow(), {"sums": await builder.get_tools("sums")}
        [record] = await collect(agent, journal, engine=engine, tools=tools)
    assert record.output == "It is fine.", record.failure
    last = engine.requests[-1]
    assert last.messages[-1]["content"] == "fine"
    assert [tool["function"]["name"] for tool in last.tools] == ["add", "odd"]


async def test_a_check_lists_the_tools_and_says_why_there_are_none() -> None:
    server = {"_type": "mcp", "command": "python"}
    tools = {"good": server | {"args": [PLAIN]}, "bad": server | {"args": [PLAIN, "dies at once"]}}
    findings, _ = await check_config(parse_config({"tools": tools}))
    found = {finding.what: finding for finding in findings.items}
    assert (found["tools good"].status, found["tools good"].detail) == ("ok", "odd, die, remember")
    assert found["tools bad"].status == "error" and "no license key" in found["tools bad"].detail
