"""A run says what of it is where, and what it waits for; a dead one is told from a live one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from etude.core.call import ChatRequest, Completion
from etude.store.status import STATUS, RunStatus, SeenStatus, status_of
from tests.cli.projects import etude
from tests.runners.playing import config_with, evaluate, examples
from tests.support import EchoEngine

ROOT = Path(__file__).parents[2]


class Held(EchoEngine):
    """Answers nothing before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()

    async def complete(self, request: ChatRequest) -> Completion:
        await self.free.wait()
        return await super().complete(request)


async def seen(run: Path, is_wanted: Any) -> RunStatus:
    """The first status that is as wanted."""
    async with asyncio.timeout(60):
        while True:
            if (run / STATUS).exists():
                status = status_of(run).status
                if status is not None and is_wanted(status):
                    return status
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_calls_that_wait_are_said_with_runners_and_without(tmp_path: Path, isolation: str):
    engine, run = Held(), tmp_path / "run"
    general = {"isolation": "process", "runners": 2} if isolation == "process" else {}
    work = examples(*[""] * 6)
    going = asyncio.ensure_future(evaluate(run, config_with(max_concurrency=4, **general), engine, work))
    try:
        status = await seen(run, lambda status: status.models[0].waiting == 4)
        liveness = status_of(run)
        assert (liveness.state, liveness.pid) == ("live", os.getpid())
        assert status.playing == 4
        assert [wait.what for wait in status.waits] == ["4 answers of model 'policy'"]
        assert sorted(each.episodes for each in status.runners) == ([2, 2] if isolation == "process" else [])
        assert {each.state for each in status.runners} <= {"ready"}
        older = await seen(run, lambda later: later.at > status.at)
        assert older.models[0].oldest > status.models[0].oldest
        engine.free.set()
        await going
    finally:
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
    assert status_of(run) == SeenStatus("ended", None, None, None)


PROGRAM = """
import asyncio
from pathlib import Path
from tests.runners.playing import *
from tests.telemetry.test_status import Held
config = config_with(max_concurrency=3)
asyncio.run(evaluate(Path(__import__("sys").argv[1]), config, Held(), examples("", "", "")))
"""


def test_another_terminal_sees_a_run_and_its_death(tmp_path: Path):
    run = tmp_path / "run"
    head = subprocess.Popen([sys.executable, "-c", PROGRAM, str(run)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (run / STATUS).exists() or status_of(run).status.models[0].waiting < 3:  # type: ignore[union-attr]
            assert head.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        shown = etude("cluster", "status", "--output-dir", tmp_path)
        assert shown.exit_code == 0
        assert f"process {head.pid} on " in shown.stdout
        assert "0 finished, 3 playing" in shown.stdout
        assert "waits for       3 answers of model 'policy'" in shown.stdout
        head.send_signal(signal.SIGSTOP)
        stopped = status_of(run).status
        assert stopped is not None
        aged = stopped.model_copy(update={"at": stopped.at - 60})
        (run / STATUS).write_text(aged.model_dump_json())
        assert "has said nothing for 1 min" in etude("cluster", "status", run).stdout
    finally:
        head.kill()
        head.wait()
    gone = etude("cluster", "status", run)
    assert f"gone: process {head.pid}" in gone.stdout
    assert "next: etude resume" in gone.stdout
    data = json.loads(etude("cluster", "status", run, "--json").stdout)
    assert (data["state"], data["pid"], data["status"]["pid"]) == ("lost", None, head.pid)
    assert "no run in" in etude("cluster", "status", "--output-dir", tmp_path).stderr
