"""A model at several addresses, as a user meets it: in `doctor`, in results, and in the record of a call."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from etude.store.episodes import iter_episodes
from etude.store.journal import Journal
from tests.cli.projects import change, etude
from tests.endpoint_process import EndpointProcess


@pytest.fixture
def servers(project, monkeypatch) -> Iterator[list[EndpointProcess]]:
    servers = [EndpointProcess("one"), EndpointProcess("two")]
    monkeypatch.setenv("POLICY", ",".join(server.url for server in servers))
    policy = {
        "_type": "openai",
        "model_name": "tiny",
        "base_url": "${POLICY}",
        "api_key": "k",
        "retry_wait": 0,
    }
    change(project / "config.yml", llms__policy=policy, finetuning={"enabled": False})
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        server.kill()


def test_which_address_answered_is_on_record(project, servers):
    lost, kept = servers
    lost.behave("500")
    shown = etude("evaluate", "config.yml", "--repeat", "2", "--name", "e", "--json")
    assert shown.exit_code == 0, shown.stderr
    with Journal(project / "runs" / "e" / "run.db") as journal:
        calls = [call for record in iter_episodes(journal) for call in record.calls]
    assert {call.completion.address for call in calls} == {kept.url}
    assert any(call.retries for call in calls)
    assert len(kept.asked()) == 16, "an answer that was recorded was asked for once"


def test_the_doctor_asks_each_address(project, servers):
    servers[1].kill()
    findings = json.loads(etude("doctor", "config.yml", "--no-loop", "--json").stdout)["findings"]
    told = {finding["what"]: (finding["status"], finding["detail"]) for finding in findings}
    assert told[f"model policy at {servers[0].url}"] == ("ok", "answers")
    status, detail = told[f"model policy at {servers[1].url}"]
    assert status == "error" and detail.startswith("ConnectError")
