"""An operator takes an address out of a run that goes on, here and in runners, and stops its server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import RequestError
from etude.store.addresses import AddressRow, read_report, take_back, take_out
from tests.endpoint_process import EndpointProcess
from tests.runners.playing import config_with, examples, opened, stored
from tests.support import until


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EndpointProcess]]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers = [EndpointProcess("one"), EndpointProcess("two")]
    for server in servers:
        server.start()
        server.behave("hold")
    yield servers
    for server in servers:
        server.kill()


@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_an_address_is_taken_out_of_a_run_without_the_loss_of_a_call(
    tmp_path: Path, servers: list[EndpointProcess], isolation: str
):
    llm: dict[str, Any] = {"_type": "openai", "model_name": "tiny", "api_key": "k", "logprobs": False}
    llm["base_url"] = [server.url for server in servers]
    more = {"runners": 2} if isolation == "process" else {}
    config = config_with(llm, isolation=isolation, max_concurrency=8, **more)
    run, (out, kept) = tmp_path / "run", servers
    async with opened(run, config, None) as runtime:
        work = asyncio.ensure_future(runtime.evaluation.run(examples(*[""] * 60), phase="before"))
        await until(lambda: bool(out.asked()))
        await until(lambda: out.url in rows(run))
        take_out(run, out.url)
        with pytest.raises(RequestError, match="the only address left of the model 'policy'"):
            take_out(run, kept.url)
        out.behave("well")
        await until(lambda: rows(run)[out.url].state == "drained")
        assert not work.done()
        kept.behave("well")
        count = len(out.asked())
        out.kill()
        output = await work
        assert output.failures == {} and output.addresses[out.url] == {"answers": count, "failed": 0}
        out.start()
        take_back(run, out.url)
        await until(lambda: rows(run)[out.url].state == "up")
        await runtime.evaluation.run(examples(*[""] * 30), phase="after")
        assert out.asked(), "it is used again"
    records = stored(run)[1]
    assert len(records) == 90 and not any(call.failed_at for record in records for call in record.calls)
    assert sum(row.answered for row in rows(run).values()) <= sum(len(record.calls) for record in records)


def rows(run: Path) -> dict[str, AddressRow]:
    return read_report(run).get("policy", {})
