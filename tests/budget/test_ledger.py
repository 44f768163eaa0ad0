"""The ledger by itself: sums by hand, room that is held, and the end of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.budget.bill import Purpose, bill_of
from etude.budget.ledger import Ledger
from etude.config.load import parse_config
from etude.core.call import Usage
from etude.store.journal import Journal

TRAIN, JUDGE = Purpose("agent", "train/1"), Purpose("judge", "train/1")
PRICES = {"prompt": 2.0, "cached": 0.5, "completion": 8.0, "training": 25.0}


def config(**changes: Any) -> Any:
    model = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1/v1", "max_tokens": 10}
    llms = {"policy": {**model, "prices": PRICES}, "free": model}
    for name, more in changes.pop("llms", {}).items():
        llms[name] = {**llms[name], **more}
    return parse_config({"llms": llms, **changes})


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "run.db") as journal:
        yield journal


async def is_stuck(task: asyncio.Future[Any]) -> bool:
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def test_the_bill_is_that_of_a_table_by_hand(journal: Journal):
    ledger = Ledger(journal, config())
    await ledger.settle(None, "policy", TRAIN, Usage(1000, 100, 400))
    await ledger.settle(None, "policy", TRAIN, Usage(2000, 200))
    await ledger.settle(None, "policy", JUDGE, Usage(500, 50))
    await ledger.settle(None, "free", Purpose("agent", "train/2"), Usage(300, 30))
    await ledger.begin_job("policy", "run-epoch-1", 40_000)
    ledger.end_job("policy", "run-epoch-1", 30_000)
    lines = {(line.model, line.role, line.phase): line for line in ledger.bill.lines}
    agent = lines["policy", "agent", "train/1"]
    assert (agent.calls, agent.prompt_tokens, agent.cached_tokens, agent.completion_tokens) == (
        2,
        3000,
        400,
        300,
    )
    # (600·2 + 400·0.5 + 100·8) + (2000·2 + 200·8), in millionths
    assert agent.usd == pytest.approx((1200 + 200 + 800 + 4000 + 1600) / 1e6)
    assert lines["policy", "judge", "train/1"].usd == pytest.approx((1000 + 400) / 1e6)
    assert lines["free", "agent", "train/2"].unpriced_tokens == 330
    assert lines["policy", "training", "run-epoch-1"].usd == pytest.approx(0.75)
    assert ledger.bill.total.usd == pytest.approx(0.75 + 0.0078 + 0.0014)
    assert ledger.bill.total.tokens == 3300 + 550 + 330 + 30_000
    assert [line.usd for line in ledger.bill.by("role")] == [agent.usd, 0.0014, 0.75]
    await journal.flush()
    assert bill_of(journal).total == ledger.bill.total


async def test_a_ledger_that_is_opened_again_goes_on_where_it_was(journal: Journal):
    await Ledger(journal, config()).settle(None, "policy", TRAIN, Usage(1000, 100))
    await journal.flush()
    again = Ledger(journal, config(budget={"tokens": 10_000}))
    assert again.limits[0].used == 1100
    await again.settle(None, "policy", TRAIN, Usage(1000, 100))
    assert again.bill.total.tokens == 2200


async def test_calls_wait_for_room_and_the_run_stops_when_none_can_come(journal: Journal):
    ledger = Ledger(journal, config(budget={"tokens": 1000}))
    stops: list[str] = []
    ledger.on_reached = lambda: stops.append(str(ledger.reached))
    first = await ledger.hold("policy", Usage(500, 100))
    second = asyncio.ensure_future(ledger.hold("policy", Usage(400, 100)))
    assert await is_stuck(second) and not stops
    await ledger.settle(first, "policy", TRAIN, Usage(100, 50))
    number = await second
    third = asyncio.ensure_future(ledger.hold("free", Usage(400, 100)))
    assert await is_stuck(third) and not stops
    await ledger.settle(number, "policy", TRAIN, Usage(400, 100))
    assert await is_stuck(third)
    assert stops == [
        "budget.tokens is 1,000 tokens: 650 tokens are used, and the next call may take up to 500 tokens"
    ]
    assert ledger.reached is not None and ledger.reached.override == "budget.tokens=2000"
    assert await is_stuck(asyncio.ensure_future(ledger.hold("free", Usage(1, 1)))), "nothing begins after it"
    third.cancel()


async def test_a_models_own_limit_counts_what_it_takes_and_no_other(journal: Journal):
    ledger = Ledger(journal, config(llms={"policy": {"budget": {"usd": 0.01}}}))
    await ledger.settle(None, "free", TRAIN, Usage(10**9, 10**9))
    await ledger.settle(None, "policy", TRAIN, Usage(4000, 0))
    await ledger.hold("free", Usage(10**9, 10**9))
    await ledger.hold("policy", Usage(900, 10))
    await journal.flush()
    ledger = Ledger(journal, config(llms={"policy": {"budget": {"usd": 0.01}}}))
    held = asyncio.ensure_future(ledger.hold("policy", Usage(1100, 0)))
    assert await is_stuck(held)
    assert ledger.reached is not None and ledger.reached.override == "llms.policy.budget.usd=0.02"
    held.cancel()


async def test_a_job_for_which_there_is_no_room_is_not_begun(journal: Journal):
    ledger = Ledger(journal, config(budget={"usd": 1.0}))
    await ledger.begin_job("policy", "one", 30_000)
    await ledger.begin_job("policy", "one", 30_000)
    assert ledger.bill.total.usd == pytest.approx(0.75), "once for each name"
    second = asyncio.ensure_future(ledger.begin_job("policy", "two", 20_000))
    assert await is_stuck(second)
    assert "the job two may take up to $0.50" in str(ledger.reached)
    second.cancel()


async def test_hours_are_those_of_all_processes_of_the_run(journal: Journal):
    clock = [0.0]
    changes = {"budget": {"hours": 1.0}}
    ledger = Ledger(journal, config(**changes), clock=lambda: clock[0])
    clock[0] = 1800.0
    ledger.tick()
    assert ledger.reached is None
    await journal.flush()
    again = Ledger(journal, config(**changes), clock=lambda: clock[0])
    clock[0] += 1799.0
    again.tick()
    assert again.reached is None
    clock[0] += 1.0
    again.tick()
    assert str(again.reached) == "budget.hours is 1 hours: 1 hours are used"
    assert again.bill.seconds == 3600
