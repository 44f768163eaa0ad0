"""`etude doctor`: a config's services are asked for the least that shows that they work; the loop runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from etude.config.load import parse_config
from etude.preflight.doctor import try_loop
from etude.preflight.finding import Findings
from etude.preflight.services import examine_services
from tests.endpoint_process import EndpointProcess


@pytest.fixture
def endpoint() -> Iterator[EndpointProcess]:
    server = EndpointProcess("one")
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def examined(url: str, tmp_path, **more) -> list[tuple[str, str, str]]:
    policy = {"_type": "openai", "model_name": "tiny", "base_url": url, "api_key": "canary-services-1"}
    config = parse_config({"llms": {"policy": policy}, **more})
    findings = Findings()
    await examine_services(config, findings)
    return [(each.what, each.status, each.detail) for each in findings.items]


async def test_a_model_answers_one_call(endpoint: EndpointProcess, tmp_path):
    storage = {"storage": f"file://{tmp_path}"}
    (listed, answered, stored) = await examined(endpoint.url, tmp_path, **storage)
    assert listed[:2] == (f"model policy at {endpoint.url}", "ok")
    assert answered[:2] == ("model policy", "ok") and "answered a call in" in answered[2]
    assert stored[:2] == ("storage", "ok")


async def test_a_model_that_is_not_there(endpoint: EndpointProcess, tmp_path):
    endpoint.kill()
    found = await examined(endpoint.url, tmp_path)
    assert [status for _, status, _ in found] == ["error", "error"]
    assert "base_url" in found[1][2] and "canary" not in str(found)


async def test_a_backend_that_does_not_answer(endpoint: EndpointProcess, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"id": "a", "question": "a?"}\n')
    found = await examined(
        endpoint.url,
        tmp_path,
        workflow="tests.runners.fragile:play",
        eval={
            "general": {"dataset": str(tmp_path / "train.jsonl")},
            "evaluators": {"length": "tests.runners.fragile:length"},
        },
        trainer_adapters={"lm_server": {"_type": "lm_server", "base_url": "http://127.0.0.1:9"}},
        finetuning={"enabled": True, "trainer_adapter": "lm_server"},
    )
    assert ("backend lm_server", "error") in [each[:2] for each in found]


@pytest.mark.slow
def test_the_loop_works_here():
    findings = Findings()
    try_loop(findings)
    assert [(each.what, each.status) for each in findings.items] == [
        ("loop: collect", "ok"),
        ("loop: train", "ok"),
        ("loop: kill and resume", "ok"),
        ("loop", "ok"),
    ]
