"""A run says what of it is where, and what it waits for; a dead one is told from a live one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import parse_config
from etude.core.call import ChatRequest, Completion
from etude.core.stats import shown_seconds
from etude.store.lock import RunLock
from etude.store.status import STATUS, RunStatus, SeenStatus, status_of
from etude.store.teams import teams_of, tell_team
from etude.telemetry import status as publishing
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


async def test_a_status_that_is_being_written_when_the_run_ends_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, free, written = threading.Event(), threading.Event(), threading.Event()
    write = publishing._write

    def slow(*arguments: Any) -> None:
        begun.set()
        free.wait(60)
        write(*arguments)
        written.set()

    monkeypatch.setattr(publishing, "_write", slow)
    going = asyncio.ensure_future(evaluate(tmp_path / "run", config_with(), EchoEngine(), examples("")))
    assert await asyncio.to_thread(begun.wait, 60)
    asyncio.get_running_loop().call_later(0.2, free.set)
    await going
    assert await asyncio.to_thread(written.wait, 60)
    assert not (tmp_path / "run" / STATUS).exists()


LATE = """
import os, time
from tests.runners.fragile import play
if os.getpid() != {head}:
    time.sleep(60)
"""


async def test_a_runner_that_does_not_come_up_is_what_the_run_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "late.py").write_text(LATE.format(head=os.getpid()))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_with(isolation="process", runners=1).model_copy(
        update={"workflow": parse_config({"workflow": "late:play"}).workflow}
    )
    going = asyncio.ensure_future(evaluate(tmp_path / "run", config, Held(), examples("")))
    try:
        status = await seen(tmp_path / "run", lambda status: status.runners[0].state == "starting")
        assert status.waits[0].what.startswith("runner 1 to start on ")
    finally:
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)


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


def test_durations_are_said_as_people_say_them():
    assert [shown_seconds(each) for each in (3.21, 250, 7500)] == ["3.2 s", "4 min 10 s", "2 h 5 min"]


def test_learners_are_those_of_a_team_that_lives(tmp_path: Path):
    folder = tmp_path / "learners" / "policy"
    folder.mkdir(parents=True)
    tell_team(folder, 2, ("10.0.0.5", "10.0.0.6"))
    assert teams_of(tmp_path) == []
    lock = RunLock(folder / "lock")
    assert [team.nodes for team in teams_of(tmp_path)] == [("10.0.0.5", "10.0.0.6")]
    lock.release()
    assert teams_of(tmp_path) == []
