"""Episodes in other processes are the same episodes; a process that dies takes its own episode with it."""

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from etude.core.call import ChatRequest, Completion, Delta
from etude.core.errors import ConfigError, EngineError, EtudeError, PromptTooLong
from etude.engines.programs import LocalChild, LocalLauncher, ProcessEnd, Program
from etude.processes import pool
from etude.wire.retries import note_retries
from tests.forked import Forked
from tests.processes.playing import config_with, evaluate, examples, fork_runners, open_run, read_run
from tests.support import EchoEngine, ScriptedEngine, is_alive, until, wait_until


def sampled_keys(log: Path) -> list[str]:
    """The key of every request that was sampled."""
    return log.read_text().split()


async def test_episodes_are_the_same_as_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every step in the journal is equal: calls with their parents and tokens, tools, scores, failures."""

    fork_runners(monkeypatch.setattr)

    def answer(request: ChatRequest) -> str | Exception:
        text = str(request.messages[-1]["content"])
        if "What is 1" in text:
            return PromptTooLong("the prompt is too long")
        return f"{request.key % 1000}: {text}"

    work = examples("", "", "raise", "tell widths")
    ways: dict[str, dict[str, Any]] = {"here": {}, "there": {"isolation": "process", "runners": 2}}
    for name, general in ways.items():
        engine = ScriptedEngine(answer, slowly=True)
        config = config_with(max_concurrency=4, **general)
        output = await evaluate(tmp_path / name, config, engine, work, generations=2, widths={"prover": 3})
        assert len(output.eval_input.eval_input_items) == 8
    here = read_run(tmp_path / "here")
    there = read_run(tmp_path / "there")
    assert there[0] == here[0]
    assert [record.calls for record in there[1]] == [record.calls for record in here[1]]
    assert "{'prover': 3}" in {event.text for record in there[1] for event in record.events}
    kinds = {record.failure.kind for record in there[1] if record.failure}
    assert kinds == {"call_failed", "raised"}
    assert (tmp_path / "there" / "runners" / "1.log").exists()


async def test_a_process_that_dies_takes_only_its_own_episode_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The others are run again, and no call that was answered is made twice."""
    fork_runners(monkeypatch.setattr)
    engine = EchoEngine(log=tmp_path / "sampled")
    config = config_with(isolation="process", runners=1, max_concurrency=3)
    output = await evaluate(tmp_path / "run", config, engine, examples("", "exit", ""))
    _, records = read_run(tmp_path / "run")
    assert [record.failure is None for record in records] == [True, False, True]
    failure = records[1].failure
    assert failure is not None
    assert (failure.kind, failure.origin) == ("died", "agent")
    log = tmp_path / "run" / "runners" / "1.log"
    assert "exit code 3" in failure.reason and failure.reason.endswith(f" {log}")
    assert [len(record.calls) for record in records] == [2, 2, 2]
    assert len(sampled_keys(tmp_path / "sampled")) == len(set(sampled_keys(tmp_path / "sampled"))) == 6
    assert [item.is_scored for item in output.evaluator_items("length")] == [True, False, True]


@pytest.mark.slow
async def test_runners_that_others_kill_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each episode comes to its end, and goes on from the calls that it had."""
    (pids := tmp_path / "pids").mkdir()
    monkeypatch.setenv("FRAGILE_PIDS", str(pids))
    engine = EchoEngine(log=tmp_path / "sampled")
    config = config_with(isolation="process", runners=2, max_concurrency=2)
    run = asyncio.ensure_future(evaluate(tmp_path / "run", config, engine, examples("wait", "wait", "")))
    await until(lambda: len(list(pids.iterdir())) == 2)
    for pid in pids.iterdir():
        os.kill(int(pid.name), signal.SIGKILL)
    (pids / "go").touch()
    assert (await run).failures == {}
    assert len(sampled_keys(tmp_path / "sampled")) == len(set(sampled_keys(tmp_path / "sampled"))) == 6


def test_no_runner_outlives_a_killed_head(tmp_path: Path):
    """Not even one that blocks."""
    (pids := tmp_path / "pids").mkdir()
    program = (
        "import asyncio\nfrom pathlib import Path\nfrom tests.processes.playing import *\n"
        "from tests.support import EchoEngine\n"
        "fork_runners()\n"
        "config = config_with(isolation='process', runners=2, max_concurrency=2)\n"
        f"run = Path({str(tmp_path / 'run')!r})\n"
        "asyncio.run(evaluate(run, config, EchoEngine(), examples('wait', 'wait')))"
    )
    environment = {**os.environ, "FRAGILE_PIDS": str(pids)}
    head = Forked(["-c", program], Path(__file__).parents[2], environment, program="python")
    wait_until(lambda: len(list(pids.iterdir())) == 2)
    runners = [int(each.name) for each in pids.iterdir()]
    assert all(map(is_alive, runners))
    head.kill()
    head.communicate()
    wait_until(lambda: not any(map(is_alive, runners)))


@pytest.mark.slow
async def test_an_agent_that_cannot_be_built_there_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_with(isolation="process", runners=1)
    misspelt = {"workflow": "tests.processes.fragile:paly", "llms": {}}
    monkeypatch.setattr(pool, "config_to_json", lambda config, **options: misspelt)
    with pytest.raises(ConfigError, match=r"'paly'.*'tests.processes.fragile:play'"):
        await evaluate(tmp_path / "run", config, EchoEngine(), examples(""))


@pytest.mark.slow
async def test_an_interrupted_evaluation_goes_on_in_runners(tmp_path: Path):
    """Calls, episodes and scores of before are read back."""
    engine = EchoEngine(log=tmp_path / "sampled")
    await evaluate(tmp_path / "run", config_with(), engine, examples("", ""))
    async with open_run(tmp_path / "run", config_with(isolation="process", runners=1), engine) as runtime:
        journal: Any = runtime.run.journal
        await journal.forget("eval/0-/0")  # Only its calls are there.
        await journal.forget("eval/1-/0/score/length")
        output = await runtime.evaluation.run(examples("", ""), phase="eval")
    assert [item.is_scored for item in output.evaluator_items("length")] == [True, True]
    assert len(sampled_keys(tmp_path / "sampled")) == 4


class Streaming(EchoEngine):
    """Answers in pieces, after failed attempts."""

    async def complete(self, request: ChatRequest) -> Completion:
        note_retries({"other": 1})
        completion = await super().complete(request)
        if request.on_delta is not None:
            for letter in str(completion.message["content"]):
                request.on_delta(Delta(content=letter, ids=(1,), logprobs=(-0.5,), top=(((1, -0.5),),)))
        if "What is 1" in str(request.messages[-1]["content"]):
            raise EngineError("the last attempt failed")
        return completion


@pytest.mark.slow
async def test_pieces_and_failed_attempts_come_through(tmp_path: Path):
    config = config_with(workflow="stream", isolation="process", runners=1)
    await evaluate(tmp_path / "run", config, Streaming(), examples("", ""))
    _, records = read_run(tmp_path / "run")
    assert [len(record.calls) for record in records] == [1, 1]
    for record in records:
        assert record.calls[0].retries == 1
    answer = records[0].calls[0].completion
    assert answer is not None
    assert records[0].output == list(str(answer.message["content"]))
    assert records[1].calls[0].error == "the last attempt failed"


def lose_all(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runners are lost as soon as they are started; gives their places."""
    launch, started = LocalLauncher.launch, list[int]()

    async def lost_at_once(self: LocalLauncher, program: Program, log: Path) -> LocalChild:
        started.append(int(log.stem))
        process = await launch(self, program, log)
        process.kill()
        await process.wait()
        lost = AsyncMock(return_value=ProcessEnd("was lost with its machine", is_lost=True))
        monkeypatch.setattr(process, "wait", lost)
        return process

    monkeypatch.setattr(LocalLauncher, "launch", lost_at_once)
    monkeypatch.setattr(pool, "_PAUSE_SECONDS", 0.01)
    return started


async def test_it_is_not_started_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = lose_all(monkeypatch)
    each = pool._START_SECONDS / 4
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + each * len(started))
    monkeypatch.setattr(pool, "time", clock)
    config = config_with(isolation="process", runners=1)
    with pytest.raises(EtudeError, match=r"runner 1 .*: was lost"):
        await evaluate(tmp_path / "run", config, EchoEngine(), examples(""))
    assert started == [1] * 4
