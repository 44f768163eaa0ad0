"""Episodes with a thread and an event loop each: the same episodes, and what blocks holds up only itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from etude.core import threads
from etude.core.call import ChatRequest, Completion
from etude.core.errors import EpisodeError
from etude.core.evaluation import EvalInputItem
from etude.rewards.evaluator import as_evaluator
from etude.rewards.scorer import evaluate
from etude.rollout.collector import Limits
from etude.rollout.reply import ToolCall
from etude.store.journal import Journal
from tests.rollout.running import collect, collect_one, jobs, timeless
from tests.support import EchoEngine, ScriptedEngine

ASK: list[Any] = [{"role": "user", "content": "hi"}]


async def everything(example: Any, episode: Any) -> list[Any]:
    """Uses all that an episode has."""
    where = asyncio.get_running_loop()

    async def look(word: str) -> str:
        """Look a word up."""
        assert asyncio.get_running_loop() is where, "a tool of the workflow's runs where it does"
        return f"{word}!"

    first = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    with episode.function("search"):
        client = episode.openai()
        pieces = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
        text = "".join([piece.choices[0].delta.content or "" async for piece in pieces])
    async with episode.tools(look) as tools:
        result = await tools.call_all([ToolCall("c", "look", {"word": first.text}, "")])
    ran = await episode.run([sys.executable, "-c", "print('ran')"])
    headers = {"authorization": f"Bearer {episode.endpoint.api_key}"}
    async with httpx.AsyncClient(base_url=episode.endpoint.base_url, headers=headers) as http:
        body = {"model": "policy", "messages": ASK, "seed": 3}
        answer = (await http.post("/chat/completions", json=body, timeout=60)).json()
    replies = await asyncio.gather(*(episode.chat(ASK, seed=seed) for seed in (1, 2)))
    episode.step_reward(1)
    episode.score("draw", episode.random.random())
    said = [text, result[0]["content"], ran.stdout, answer["choices"][0]["message"]["content"]]
    return [*said, *(reply.text for reply in replies)]


async def test_the_records_are_those_of_the_runs_own_loop(tmp_path: Path):
    runs, steps = [], []
    for own_loops in (False, True):
        with Journal(tmp_path / f"{own_loops}.db") as journal:
            engine = ScriptedEngine(lambda request: f"{request.key % 1000}", slowly=True)
            records = await collect(everything, journal, engine=engine, work=jobs(4), own_loops=own_loops)
            assert [record.failure for record in records] == [None] * 4
            assert len(records[0].calls) == 5
            runs.append(
                [
                    (record.calls, record.output, [event.kind for event in record.events])
                    for record in timeless(records)
                ]
            )
            steps.append(sorted(key for key, _ in journal.scan()))
            again = await collect(everything, journal, engine=EchoEngine(), work=jobs(4), own_loops=own_loops)
            assert again == records, "from the journal"
    assert runs[0] == runs[1]
    assert steps[0] == steps[1]


async def test_workflows_that_block_hinder_no_other(journal: Journal):
    barrier = threading.Barrier(8, timeout=60)

    async def play(example: Any, episode: Any) -> str:
        await episode.chat(ASK)
        barrier.wait()
        return (await episode.chat(ASK)).text

    records = await collect(
        play, journal, work=jobs(8), own_loops=True, limits=Limits(max_concurrency=8, timeout=60)
    )
    assert [record.failure for record in records] == [None] * 8


async def test_a_client_that_blocks_is_answered_by_the_episodes_endpoint(journal: Journal):
    async def play(example: Any, episode: Any) -> str:
        endpoint = episode.endpoint
        with httpx.Client(base_url=endpoint.base_url, timeout=60) as http:
            headers = {"authorization": f"Bearer {endpoint.api_key}"}
            body = {"model": "policy", "messages": ASK}
            answer = http.post("/chat/completions", json=body, headers=headers)  # noqa: ASYNC212
        return str(answer.json()["choices"][0]["message"]["content"])

    record = await collect_one(play, journal, own_loops=True)
    assert record.failure is None
    assert len(record.calls) == 1


async def test_one_that_does_not_end_fails_by_name_and_is_counted(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.05)
    release, refused = threading.Event(), threading.Event()

    async def play(example: Any, episode: Any) -> str:
        if example.id != "1":
            return (await episode.chat(ASK)).text
        try:
            release.wait()
            await episode.chat(ASK)
        except EpisodeError:
            refused.set()
        return "too late"

    work = jobs(3)
    limits = Limits(timeout=2.0)
    records = await collect(play, journal, work=work, own_loops=True, limits=limits)
    assert [record.failure is None for record in records] == [True, False, True]
    failure = records[1].failure
    assert failure is not None
    assert failure.kind == "timeout"
    assert "test_own_loops.py" in failure.reason
    assert failure.reason.endswith("no output within 2 s; its thread does not end, and was given up")
    assert threads.threads_left() == 1
    release.set()
    async with asyncio.timeout(60):
        while threads.threads_left():  # noqa: ASYNC110  another thread ends
            await asyncio.sleep(0.01)


async def test_calls_under_way_of_one_that_is_given_up_are_taken_back(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.05)
    release, cancelled = threading.Event(), asyncio.Event()

    class Never(EchoEngine):
        async def complete(self, request: ChatRequest) -> Completion:
            try:
                await asyncio.sleep(600)
            finally:
                cancelled.set()
            raise AssertionError

    async def play(example: Any, episode: Any) -> None:
        asking = asyncio.create_task(episode.chat(ASK))
        await asyncio.sleep(0)
        release.wait()
        await asking

    record = await collect_one(play, journal, engine=Never(), own_loops=True, limits=Limits(timeout=0.5))
    assert record.failure is not None and record.failure.kind == "timeout"
    await asyncio.wait_for(cancelled.wait(), 60)
    release.set()


def leave() -> None:
    sys.exit(3)


def end() -> None:
    os._exit(0)


def interrupt() -> None:
    raise KeyboardInterrupt


def cancel() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (leave, "SystemExit: 3"),
        (end, "ProcessExit"),
        (interrupt, "KeyboardInterrupt"),
        (cancel, "the workflow cancelled itself"),
        (lambda: asyncio.get_running_loop().stop(), "stopped before"),
    ],
)
async def test_what_would_end_the_run_fails_its_episode(
    journal: Journal, deed: Callable[[], None], words: str
):
    async def play(example: Any, episode: Any) -> str:
        deed()
        await asyncio.sleep(0.01)
        return "done"

    record = await collect_one(play, journal, own_loops=True)
    assert record.failure is not None and record.failure.kind == "raised"
    assert words in record.failure.reason


async def test_tools_that_block_hold_up_only_their_episode(journal: Journal):
    barrier = threading.Barrier(4, timeout=60)

    async def meet() -> str:
        """Wait for the others."""
        barrier.wait()
        return "met"

    async def play(example: Any, episode: Any) -> Any:
        async with episode.tools(meet) as tools:
            return (await tools.call(ToolCall("c", "meet", {}, "")))["content"]

    def plain(example: Any, episode: Any) -> Any:
        with episode.tools(meet) as tools:
            return tools.call(ToolCall("c", "meet", {}, ""))["content"]

    for number, workflow in enumerate((play, plain)):
        work = [*jobs(4)]
        work = [type(job)(f"{number}/{job.id}", job.example) for job in work]
        records = await collect(workflow, journal, work=work, own_loops=True)
        assert [record.output for record in records] == ["met"] * 4


def item() -> EvalInputItem:
    return EvalInputItem(id="x", input_obj={"n": 1}, expected_output_obj=1, output_obj=1)


async def test_evaluators_that_block_hinder_no_other():
    barrier = threading.Barrier(4, timeout=60)

    async def score(example: Any, output: Any) -> float:
        barrier.wait()
        return 1.0

    asked = (evaluate(as_evaluator(score), [item()], 60.0, own_loop=True) for _ in range(4))
    assert [outputs[0].score for outputs in await asyncio.gather(*asked)] == [1.0] * 4


async def test_an_evaluator_that_does_not_end_gives_no_score(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.05)

    async def score(example: Any, output: Any) -> float:
        while True:
            with contextlib.suppress(Exception):
                [].pop()

    (output,) = await evaluate(as_evaluator(score), [item()], 0.2, own_loop=True)
    assert output.error == "the evaluator took longer than 0.2 s"
