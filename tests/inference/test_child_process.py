"""A process group never goes on without its guard."""

from __future__ import annotations

import asyncio
import signal

import pytest

from etude.inference.child_process import guard_of


async def sleeper():
    return await asyncio.create_subprocess_exec("sleep", "3600", start_new_session=True)


async def test_a_group_whose_guard_is_given_up_is_killed():
    process = await sleeper()
    starting = asyncio.create_task(guard_of(process.pid))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL


async def test_a_guard_leaves_a_group_alone_until_it_is_let_go():
    process = await sleeper()
    guard = await guard_of(process.pid)
    await asyncio.sleep(0.2)
    assert process.returncode is None and guard.returncode is None
    assert guard.stdin is not None
    guard.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL
    await guard.wait()
