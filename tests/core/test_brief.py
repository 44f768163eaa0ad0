"""Short calls in one thread: who waits for whom, and what becomes of those that are not short."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from etude.core import brief, threads
from etude.core.brief import call_briefly

_NAME: ContextVar[str] = ContextVar("name")


async def test_calls_at_one_time_are_done_by_one_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(brief, "_MOMENT_SECONDS", 600.0)
    all_asked = threading.Event()

    def first() -> int:
        all_asked.wait()
        return threading.get_ident()

    calls = [asyncio.ensure_future(call_briefly(each)) for each in (first, *[threading.get_ident] * 50)]
    await asyncio.sleep(0)
    all_asked.set()
    done = {await call for call in calls}
    assert len(done) == 1
    assert threading.get_ident() not in done


async def test_each_has_its_own_result_error_and_context():
    def divided(by: int) -> tuple[int, str]:
        return 12 // by, _NAME.get()

    async def call(by: int) -> tuple[int, str]:
        _NAME.set(f"by {by}")
        return await call_briefly(lambda: divided(by))

    results = await asyncio.gather(*map(call, (1, 0, 3)), return_exceptions=True)
    assert results[0] == (12, "by 1")
    assert isinstance(results[1], ZeroDivisionError)
    assert results[2] == (4, "by 3")


async def test_none_waits_for_another_that_blocks():
    everyone = threading.Barrier(20)  # Passed only when all are in it at the same time.
    await asyncio.gather(*(call_briefly(lambda: everyone.wait(timeout=60)) for _ in range(20)))


async def test_those_after_one_that_hangs_end():
    go_on = threading.Event()
    hanging = asyncio.ensure_future(call_briefly(go_on.wait))
    assert await asyncio.gather(*(call_briefly(lambda: 1) for _ in range(5))) == [1] * 5
    assert not hanging.done()
    go_on.set()
    assert await hanging


async def test_a_call_that_is_given_up_takes_no_other_along(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.05)
    go_on = threading.Event()

    def endless() -> None:
        while not go_on.wait(0.005):
            pass

    try:
        hanging = asyncio.ensure_future(call_briefly(endless, stop=lambda: None))
        await asyncio.sleep(0)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await call_briefly(lambda: 2) == 2
    finally:
        go_on.set()


async def test_what_was_cancelled_before_its_turn_holds_nothing_up():
    turns = [asyncio.ensure_future(call_briefly(lambda: 1)) for _ in range(3)]
    await asyncio.sleep(0)
    turns[1].cancel()
    assert (await turns[0], await turns[2]) == (1, 1)
    with pytest.raises(asyncio.CancelledError):
        await turns[1]
