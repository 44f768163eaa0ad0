"""A run says what of it is where and what it waits for, and ends where nothing moves."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from etude.config.schema import StallConfig
from etude.core.call import ChatRequest, Completion
from etude.core.errors import StalledError
from etude.core.interfaces import Engine, Progress
from etude.runtime import Runtime, open_runtime
from etude.store.run_folder import RunFolder
from etude.store.status import STATUS, RunStatus, SeenStatus, run_status
from tests.cli.projects import etude, succeed
from tests.forked import Forked
from tests.processes.playing import config_with, evaluate, examples
from tests.support import EchoEngine, one_quick, until, wait_until


class Held(EchoEngine):
    """Answers nothing before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()

    async def complete(self, request: ChatRequest) -> Completion:
        await self.free.wait()
        return await super().complete(request)


async def wait_for_status(run: Path, is_wanted: Any) -> RunStatus:
    """The first status that is as wanted."""
    async with asyncio.timeout(60):
        while (status := run_status(run).status) is None or not is_wanted(status):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return status


@pytest.mark.parametrize("isolation", one_quick("none", "process"))
async def test_calls_that_wait_are_said_with_runners_and_without(tmp_path: Path, isolation: str):
    engine, run = Held(), tmp_path / "run"
    general = {"isolation": "process", "runners": 2} if isolation == "process" else {}
    work = examples(*[""] * 6)
    going = asyncio.ensure_future(evaluate(run, config_with(max_concurrency=4, **general), engine, work))
    try:
        status = await wait_for_status(run, lambda status: status.models[0].waiting == 4)
        liveness = run_status(run)
        assert (liveness.state, liveness.pid) == ("live", os.getpid())
        assert status.playing == 4
        assert [wait.what for wait in status.waits] == ["4 answers of model 'policy'"]
        assert sorted(each.episodes for each in status.runners) == ([2, 2] if isolation == "process" else [])
        assert {each.state for each in status.runners} <= {"ready"}
        older = await wait_for_status(run, lambda later: later.at > status.at)
        assert older.models[0].oldest > status.models[0].oldest
        engine.free.set()
        await going
    finally:
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
    assert run_status(run) == SeenStatus("ended", None, None, None)


PROGRAM = """
import asyncio
from pathlib import Path
from tests.processes.playing import *
from tests.processes.test_status import Held
config = config_with(max_concurrency=3)
asyncio.run(evaluate(Path(__import__("sys").argv[1]), config, Held(), examples("", "", "")))
"""


def test_another_terminal_sees_a_run_and_its_death(tmp_path: Path):
    run = tmp_path / "run"
    head = Forked(["-c", PROGRAM, str(run)], Path(__file__).parents[2], dict(os.environ), program="python")
    try:
        wait_until(lambda: (seen := run_status(run).status) is not None and seen.models[0].waiting == 3)
        shown = succeed("cluster", "status", "run", "--output-dir", tmp_path)
        assert f"process {head.pid} on " in shown.stdout
        assert "0 finished, 3 playing" in shown.stdout
        assert "waits for       3 answers of model 'policy'" in shown.stdout
        head.send_signal(signal.SIGSTOP)
        stopped = run_status(run).status
        aged = stopped.model_copy(update={"at": stopped.at - 60})
        (run / STATUS).write_text(aged.model_dump_json())
        assert "not reported for 1 min" in etude("cluster", "status", run).stdout
    finally:
        head.kill()
        head.communicate()
    gone = etude("cluster", "status", run)
    assert f"gone: process {head.pid}" in gone.stdout
    assert "next: etude resume" in gone.stdout
    data = json.loads(etude("cluster", "status", run, "--json").stdout)
    assert (data["state"], data["pid"], data["status"]["pid"]) == ("lost", None, head.pid)


class Messages(Progress):
    """Keeps what a person is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str, *, warning: bool = False) -> None:
        self.texts.append(text)

    async def one_with(self, words: str, number: int = 1) -> str:
        """The first message that has these words, or a later one."""
        await until(lambda: sum(words in text for text in self.texts) >= number)
        return [text for text in self.texts if words in text][number - 1]


@asynccontextmanager
async def watch_run(
    folder: Path,
    messages: Messages,
    engine: Engine | None = None,
    episode: float = 300.0,
    say_after: float = 120.0,
    end_after: float = 3600.0,
) -> AsyncIterator[Runtime]:
    """A run that is watched so."""
    config = config_with(max_concurrency=4, timeout=episode)
    config = config.model_copy(update={"stall": StallConfig(end_after=end_after)})
    with pytest.MonkeyPatch.context() as patch, RunFolder.create(folder, "run") as run:
        patch.setattr(StallConfig, "say_after", say_after)
        async with open_runtime(
            config, run, progress=messages, engines={"policy": engine or EchoEngine()}
        ) as runtime:
            yield runtime


async def test_what_is_waited_for_is_said_and_that_it_goes_on_again(tmp_path: Path):
    engine, messages = Held(), Messages()
    async with watch_run(tmp_path, messages, engine, say_after=0.3) as runtime:
        going = asyncio.ensure_future(runtime.evaluation.run(examples(*[""] * 6), phase="eval"))
        text = await messages.one_with("nothing has moved")
        assert "4 answers of model 'policy'" in text
        assert text.endswith(f"py-spy dump --pid {os.getpid()}")
        await messages.one_with("nothing has moved", 2)
        engine.free.set()
        await going
        await messages.one_with("moves again after")


async def test_a_run_in_which_nothing_moves_ends_and_says_why(tmp_path: Path):
    messages = Messages()
    with pytest.raises(StalledError, match=r"^nothing has moved .*`stall.end_after`"):
        async with watch_run(tmp_path, messages, episode=0.2, say_after=0.2, end_after=0.5):
            await asyncio.sleep(60)
    assert messages.texts[-1].startswith("nothing has moved ")


async def test_an_event_loop_that_is_blocked_is_said_while_it_is(tmp_path: Path):
    messages = Messages()
    async with watch_run(tmp_path, messages, say_after=0.2):
        await asyncio.sleep(0.1)
        time.sleep(1)  # noqa: ASYNC251  that is what is wrong with it
        assert "loop has been blocked" in " ".join(messages.texts)


async def test_a_job_that_is_waited_for_is_no_stall(tmp_path: Path):
    messages = Messages()
    async with watch_run(tmp_path, messages, episode=0.1, say_after=0.2, end_after=0.3) as runtime:
        with runtime.watchdog.waiting_for_job():
            await asyncio.sleep(1)
        assert not messages.texts
        await messages.one_with("nothing has moved")
        runtime.progress.phase("training")
