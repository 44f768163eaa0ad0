"""Metrics of a run over real HTTP, read by the parser of Prometheus's own client."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from etude.config.load import parse_config
from tests.runners.playing import config_with, evaluate, examples
from tests.telemetry.test_status import Held, seen


def scraped(address: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The labels and values of all samples, by name."""
    with urllib.request.urlopen(address, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/plain")
        text = response.read().decode()
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


async def test_a_run_is_scraped_while_it_goes_on(tmp_path: Path):
    engine, run = Held(), tmp_path / "a run"
    config = config_with(max_concurrency=2, isolation="process", runners=1)
    config = config.model_copy(update={"metrics": parse_config({"metrics": {"port": 0}}).metrics})
    going = asyncio.ensure_future(evaluate(run, config, engine, examples("", "")))
    try:
        status = await seen(run, lambda status: status.models[0].waiting == 2)
        assert status.metrics is not None
        assert status.metrics.startswith("http://127.0.0.1:")
        samples = await asyncio.to_thread(scraped, status.metrics)
        assert samples["etude_calls_in_flight"] == [({"run": "a run", "model": "policy"}, 2)]
        assert samples["etude_runners"] == [
            ({"run": "a run", "node": socket.gethostname(), "state": "ready"}, 1)
        ]
        assert samples["etude_episodes_total"][1] == ({"run": "a run", "outcome": "failed"}, 0)
        assert samples["etude_status_seconds"][0][1] == pytest.approx(time.time(), abs=60)
    finally:
        engine.free.set()
        await going
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scraped, status.metrics)
