"""Training jobs in the ledger: room is held before they are submitted, and their own count in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.backends.openai_adapters import OpenAiAdapter, OpenAiAdapterConfig
from etude.budget.ledger import Ledger
from etude.config.finetuning import FinetuneConfig
from etude.config.load import parse_config
from etude.core.job import TrainingJobRef
from etude.groups.line import ModelLine
from etude.store.journal import Journal
from tests.backends.openai_stand_in import BASE, StandIn
from tests.backends.test_openai_jobs import supervised
from tests.support import EchoEngine


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "run.db") as journal:
        yield journal


def ledger_of(journal: Journal, usd: float) -> Ledger:
    model = {"_type": "openai", "model_name": BASE, "max_tokens": 10}
    model["prices"] = {"prompt": 1, "completion": 1, "training": 25.0}
    return Ledger(journal, parse_config({"llms": {"policy": model}, "budget": {"usd": usd}}))


async def line_of(server: StandIn, journal: Journal, ledger: Ledger) -> ModelLine:
    adapter = OpenAiAdapter(OpenAiAdapterConfig(retry_wait=0.001, n_epochs=2), server.client(), BASE)
    await adapter.initialize(FinetuneConfig())
    line = ModelLine("policy", "policy", adapter, EchoEngine(), journal, ledger=ledger)
    await line.take_up(None)
    return line


async def test_a_job_counts_as_the_most_it_may_train_on_and_then_as_the_api_says(journal: Journal):
    server, ledger = StandIn(), ledger_of(journal, 1.0)
    line = await line_of(server, journal, ledger)
    data = supervised()
    tokens = line.adapter.charged_tokens(data)
    assert tokens is not None
    ref = await line.submit(data)
    assert isinstance(ref, TrainingJobRef)
    assert ledger.bill.total.usd == pytest.approx(tokens * 25 / 1e6)
    await line.wait(ref, 30.0, 0.01)
    [job] = ledger.bill.lines
    assert (job.role, job.phase) == ("training", data.run_id)
    trained = server.jobs["ftjob-0"]["trained_tokens"]
    assert 0 < trained == job.trained_tokens
    assert job.usd == pytest.approx(trained * 25 / 1e6)


async def test_a_job_that_costs_too_much_is_not_submitted(journal: Journal):
    server, ledger = StandIn(), ledger_of(journal, 1e-5)
    line = await line_of(server, journal, ledger)
    stopped = asyncio.Event()
    ledger.on_reached = stopped.set
    submitting = asyncio.ensure_future(line.submit(supervised()))
    await asyncio.wait_for(stopped.wait(), 20)
    assert not submitting.done() and not server.jobs and not server.files
    assert ledger.reached is not None and ledger.reached.override.startswith("budget.usd=")
    submitting.cancel()
