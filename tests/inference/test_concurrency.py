"""As many requests at once as an address can do with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from etude.core.call import ChatRequest
from etude.inference.concurrency import UNPROVEN, AdaptiveConcurrency
from etude.inference.openai_compatible import OpenAiEngine
from etude.inference.openai_config import OpenAiLlmConfig
from tests.faults import remote_faults as faults
from tests.faults.remote_faults import Fault, FaultyEndpoint


@pytest.fixture
async def endpoint() -> AsyncIterator[FaultyEndpoint]:
    async with FaultyEndpoint().serving() as endpoint:
        yield endpoint


async def hold(pace: AdaptiveConcurrency, count: int) -> list[asyncio.Task[None]]:
    """Requests that want to be under way, and do not end by themselves."""

    async def request() -> None:
        async with pace.slot():
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(request()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_before_the_first_answer_there_are_few_and_afterwards_any_number() -> None:
    pace = AdaptiveConcurrency()
    tasks = await hold(pace, 200)
    assert pace.under_way == UNPROVEN
    pace.answered()
    await asyncio.sleep(0)
    assert pace.under_way == 200
    await end(*tasks)
    assert pace.under_way == 0


async def test_overload_halves_once_for_all_that_were_under_way_and_answers_add_one_a_round() -> None:
    now = [0.0]
    pace = AdaptiveConcurrency(lambda: now[0])
    pace.answered()
    tasks = await hold(pace, 64)
    now[0] = 1.0
    for _ in range(10):
        pace.overloaded(since=0.5)
    assert pace.limit == 32
    for _ in range(33):
        pace.answered()
    assert pace.limit == pytest.approx(33, abs=0.1)
    now[0] = 2.0
    pace.overloaded(since=1.5)
    assert pace.limit == pytest.approx(16.5, abs=0.1)
    now[0] = 3.0
    pace.overloaded(since=2.5)
    assert pace.limit == pytest.approx(16.5, abs=0.1), "nothing was answered meanwhile: it is away"
    await end(*tasks)


async def test_who_is_cancelled_takes_no_place_and_who_came_first_goes_first() -> None:
    pace = AdaptiveConcurrency()
    held = await hold(pace, UNPROVEN)
    first, second, third = await hold(pace, 3)
    await end(first)
    await end(held[0])
    await asyncio.sleep(0)
    assert pace.under_way == UNPROVEN
    await end(second, held[1])  # The place that it has just been given goes to the third.
    await asyncio.sleep(0)
    assert pace.under_way == UNPROVEN - 1
    await end(third, *held)
    assert pace.under_way == 0 and pace.limit == UNPROVEN < math.inf


async def test_an_address_that_can_do_with_four_calls_at_once_gets_them_all_done(
    endpoint: FaultyEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, under_way = 0, 0

    async def answers_four(writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        if under_way >= 4:
            await faults.fails(429, "too many")(writer)
            return
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.005)
        under_way -= 1
        await faults.says(200, faults.completion())(writer)

    monkeypatch.setitem(faults.FAULTS, "four", Fault("temporary", answers_four, ""))
    config = OpenAiLlmConfig(
        model_name="tiny", base_url=endpoint.url("four"), retry_wait=0.02, max_retries=12, request_timeout=60
    )
    engine = OpenAiEngine(config)
    request = ChatRequest(({"role": "user", "content": "x"},))
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(engine.complete(request) for _ in range(64)))
    await engine.close()
    assert (len(answers), most) == (64, 4)
