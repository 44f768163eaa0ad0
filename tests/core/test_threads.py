"""Code that may block: its results and errors, and threads of which nobody knows when they end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from etude.core import threads
from etude.core.threads import call_in_thread, on_loop, on_own_loop, threads_left


async def none_left() -> None:
    async with asyncio.timeout(60):
        while threads_left():  # noqa: ASYNC110  other threads end
            await asyncio.sleep(0.01)


async def test_a_coroutine_runs_in_a_thread_with_a_loop_of_its_own():
    async def work() -> tuple[bool, bool]:
        await asyncio.sleep(0)
        return asyncio.get_running_loop() is home, threading.current_thread() is threading.main_thread()

    home = asyncio.get_running_loop()
    assert await on_own_loop(work) == (False, False)


async def test_coroutines_that_block_do_so_at_the_same_time():
    barrier = threading.Barrier(20, timeout=60)

    async def work() -> None:
        barrier.wait()

    await asyncio.gather(*(on_own_loop(work) for _ in range(20)))


def leave() -> None:
    sys.exit(3)


def stop_iteration() -> None:
    raise StopIteration("odd")


def stop_loop() -> None:
    asyncio.get_running_loop().stop()


def fail() -> None:
    raise ValueError("as told")


@pytest.mark.parametrize(
    ("deed", "kind", "words"),
    [
        (leave, RuntimeError, "the function raised SystemExit: 3"),
        (stop_iteration, RuntimeError, "StopIteration"),
        (stop_loop, RuntimeError, "stopped before"),
        (fail, ValueError, "as told"),
    ],
)
async def test_what_ends_it_is_an_error_where_it_is_awaited(
    deed: Callable[[], None], kind: type[Exception], words: str
):
    async def work() -> None:
        deed()
        await asyncio.sleep(0)

    with pytest.raises(kind, match=words):
        await on_own_loop(work)


async def test_tasks_that_it_leaves_are_cancelled():
    ended = threading.Event()

    async def forgotten() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    async def work() -> None:
        tasks.append(asyncio.create_task(forgotten()))
        await asyncio.sleep(0)

    tasks: list[Any] = []
    await on_own_loop(work)
    assert ended.is_set()


async def test_a_coroutine_that_is_cancelled_may_clean_up():
    cleaned, begun = threading.Event(), asyncio.Event()
    home = asyncio.get_running_loop()

    async def work() -> None:
        home.call_soon_threadsafe(begun.set)
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    waiting = asyncio.ensure_future(on_own_loop(work))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cleaned.is_set()
    await none_left()


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_thread_that_does_not_end_is_counted_and_interrupted(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.05)

    def spin() -> None:
        while True:
            with contextlib.suppress(Exception):
                [].pop()

    async def work() -> None:
        spin()

    call = on_own_loop(work) if is_async else call_in_thread(spin, stop=lambda: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call, 0.05)
    await none_left()


@pytest.mark.parametrize("is_async", [True, False], ids=["on a loop", "left to itself"])
async def test_a_thread_that_waits_in_native_code_is_counted_until_it_ends(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.05)
    release, begun = threading.Event(), asyncio.Event()
    home = asyncio.get_running_loop()

    def wait() -> None:
        home.call_soon_threadsafe(begun.set)
        release.wait()

    async def work() -> None:
        wait()

    waiting = asyncio.ensure_future(on_own_loop(work) if is_async else call_in_thread(wait))
    await begun.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert threads_left() == 1
    release.set()
    await none_left()


async def test_threads_serve_again_after_one_was_interrupted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.01)

    async def nap(over: threading.Event) -> None:
        over.wait()

    for _ in range(5):
        over = threading.Event()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(on_own_loop(partial(nap, over)), 0.02)
        over.set()
    await none_left()
    assert await asyncio.gather(*(call_in_thread(lambda: 1) for _ in range(10))) == [1] * 10


async def test_a_coroutine_can_be_run_on_another_loop():
    home = asyncio.get_running_loop()

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def work() -> asyncio.AbstractEventLoop:
        return await on_loop(home, where())

    assert await on_own_loop(work) is home
    assert await on_loop(home, where()) is home
