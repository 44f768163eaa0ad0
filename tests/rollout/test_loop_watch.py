"""Agents that block the event loop: with them nothing else runs, not even a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time

import pytest

from etude.rollout import run_workflow
from etude.rollout.collector import Limits
from etude.rollout.loop_watch import watch_loop
from etude.store.journal import Journal
from tests.rollout.running import collect, jobs

ASK = [{"role": "user", "content": "hi"}]


LIMIT = 600.0


@pytest.fixture(autouse=True)
def impatient_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch waits for a two-thousandth of the episodes' limit: none that is well runs out of time."""
    monkeypatch.setattr(run_workflow, "watch_loop", lambda seconds, code: watch_loop(seconds / 2000, code))


async def sleeps(example, episode):
    await episode.chat(ASK)
    if example.id == "1":
        time.sleep(3600)  # noqa: ASYNC251  what this is about
    return "done"


async def spins(example, episode):
    while example.id == "1":
        with contextlib.suppress(Exception):
            [].pop()
    return "done"


@pytest.mark.parametrize("workflow", [sleeps, spins])
async def test_an_agent_that_blocks_the_event_loop_fails_and_the_run_goes_on(
    workflow, journal: Journal
) -> None:
    limits = Limits(max_concurrency=1, timeout=LIMIT)
    records = await collect(workflow, journal, work=jobs(3), limits=limits)
    assert [record.output for record in records] == ["done", None, "done"]
    failure = records[1].failure
    assert failure is not None and failure.kind == "timeout"
    assert (
        "test_loop_watch.py:" in failure.reason and "blocked the event loop; await instead" in failure.reason
    )


async def test_code_that_is_no_agent_may_block(journal: Journal) -> None:
    def slow_jobs():
        yield jobs(1)[0]
        time.sleep(1.0)
        yield jobs(2)[1]

    records = await collect(sleeps, journal, work=list(jobs(1)), limits=Limits(timeout=LIMIT))
    assert records[0].output == "done"
    records = await collect(spins, journal, work=slow_jobs(), limits=Limits(max_concurrency=1, timeout=LIMIT))
    assert len(records) == 2


async def test_the_signal_handler_is_put_back(journal: Journal) -> None:
    before = signal.getsignal(signal.SIGURG)
    await collect(sleeps, journal)
    assert signal.getsignal(signal.SIGURG) is before
    assert not any(thread.name == "etude-loop-watch" for thread in threading.enumerate())


def test_outside_of_the_main_thread_agents_run_without_the_watch(tmp_path) -> None:
    outputs = []

    def run() -> None:
        with Journal(tmp_path / "run.db") as journal:
            outputs.extend(record.output for record in asyncio.run(collect(sleeps, journal)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outputs == ["done"]
