"""Stacks lead to the place where a task waits, whatever it waits through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from etude.telemetry.stacks import all_stacks


@asynccontextmanager
async def opened(told: asyncio.Event) -> AsyncIterator[None]:
    await told.wait()
    yield


async def enter(told: asyncio.Event) -> None:
    async with opened(told):
        pass


async def test_through_an_async_context_manager_to_what_it_waits_for() -> None:
    told = asyncio.Event()
    tasks = [asyncio.create_task(enter(told)) for _ in range(3)]
    await asyncio.sleep(0)
    text = all_stacks(tasks)
    told.set()
    await asyncio.gather(*tasks)
    assert text.startswith("3 of these tasks:\n")
    places = [line.strip() for line in text.partition("\nthread")[0].splitlines()]
    assert places.index("async with opened(told):") < places.index("await told.wait()")
    assert "await fut" in places
