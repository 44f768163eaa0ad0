"""Workflows written as plain functions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

from etude.core.call import ChatRequest
from etude.core.errors import EpisodeError
from etude.rollout.collector import Limits
from etude.rollout.workflow import function
from etude.store.journal import Journal
from tests.rollout.running import collect, collect_one, jobs, timeless
from tests.support import EchoEngine, ScriptedEngine

ASK = [{"role": "user", "content": "hi"}]


async def test_a_plain_function_talks_to_the_model_and_is_recorded(journal: Journal) -> None:
    @function
    def search(episode):
        return episode.chat(ASK)

    def play(example, episode):
        assert threading.current_thread() is not threading.main_thread()
        first = episode.chat([{"role": "user", "content": example.inputs["question"]}])
        search(episode)
        episode.step_reward(1)
        episode.note(f"{episode.example.id} {episode.generation}")
        with episode.function("writer"):
            episode.chat(ASK)
        return [first.text, episode.id, episode.random.random()]

    record = await collect_one(play, journal)
    assert record.failure is None
    assert [call.function for call in record.calls] == ["<workflow>", "search", "writer"]
    assert [(event.kind, event.after_call) for event in record.events] == [("step_reward", 1), ("note", 1)]
    assert record.output[1] == record.id


async def test_plain_and_async_functions_give_the_same_record(tmp_path: Path) -> None:
    def plain(example, episode):
        return [episode.chat(ASK).text, episode.random.random()]

    async def with_asyncio(example, episode):
        return [(await episode.chat(ASK)).text, episode.random.random()]

    runs = []
    for name, workflow in (("a", plain), ("b", with_asyncio)):
        with Journal(tmp_path / f"{name}.db") as journal:
            runs.append(timeless(await collect(workflow, journal, work=jobs(5))))
    assert runs[0] == runs[1]


async def test_the_plain_openai_client_is_recorded(journal: Journal) -> None:
    def play(example, episode):
        client = episode.openai()
        answer = client.chat.completions.create(model="gpt-x", messages=ASK)
        streamed = client.chat.completions.create(model="gpt-x", messages=ASK, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        return [answer.choices[0].message.content, text]

    record = await collect_one(play, journal, engine=ScriptedEngine(["one", "two"]))
    assert record.output == ["one", "two"]
    assert len(record.calls) == 2


async def test_a_thread_that_waits_for_a_model_is_let_go_at_the_timeout(journal: Journal) -> None:
    raised: list[BaseException] = []
    over = threading.Event()

    class Never(EchoEngine):
        async def complete(self, request: ChatRequest):
            await asyncio.Event().wait()

    def play(example, episode):
        for _ in range(2):
            try:
                episode.chat(ASK)
            except EpisodeError as error:
                raised.append(error)
        over.set()

    record = await collect_one(play, journal, engine=Never(), limits=Limits(timeout=0.05))
    assert record.failure is not None and record.failure.kind == "timeout"
    assert await asyncio.to_thread(over.wait, 60)
    assert ["is over" in str(error) for error in raised] == [True, True]


async def test_a_function_that_hands_back_a_coroutine_is_told_to_be_async(journal: Journal) -> None:
    async def inner(example, episode):
        return episode.chat(ASK)

    record = await collect_one(lambda example, episode: inner(example, episode), journal)
    assert record.failure is not None and "write it with `async def`" in record.failure.reason


async def test_a_blocking_call_on_the_event_loop_is_refused(journal: Journal) -> None:
    kept = []

    def play(example, episode):
        kept.append(episode)

        async def on_the_loop():
            episode.chat(ASK)

        asyncio.run_coroutine_threadsafe(on_the_loop(), episode.loop.loop).result()

    record = await collect_one(play, journal)
    assert record.failure is not None and "would wait for ever" in record.failure.reason


def test_a_program_ends_though_a_thread_and_a_task_hang(tmp_path: Path) -> None:
    program = f"""
import asyncio, contextlib, sys, threading
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from etude.core import threads
from etude.rollout.collector import Limits
from etude.store.journal import Journal
from tests.rollout.running import collect_one

threads.GRACE_SECONDS = 0.05

def thread(example, episode):
    threading.Event().wait()

async def task(example, episode):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

async def main():
    for number, workflow in enumerate((thread, task)):
        with Journal(f"{{number}}.db") as journal:
            record = await collect_one(workflow, journal, limits=Limits(timeout=0.05))
            print(record.failure.kind)

asyncio.run(main())
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert (answer.stdout.split(), answer.returncode) == (["timeout", "timeout"], 0), answer.stderr
