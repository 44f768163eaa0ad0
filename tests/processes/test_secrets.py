"""Secrets go to no other machine: references do, and what is written out is refused by name."""

import json
import socket
from typing import Any

import pytest

from etude.config.document import portable_references, required_variables
from etude.config.load import parse_config
from etude.core.errors import RequestError
from etude.processes.shipping import config_from_json, config_to_json

SECRET = "canary-a7f3"


def config(**llm: Any) -> Any:
    """A config with a key of every kind."""
    policy = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9", **llm}
    return parse_config(
        {
            "llms": {"policy": policy, "judge": {**policy, "api_key": "${JUDGE_KEY}"}},
            "workflow": "tests.processes.fragile:play",
            "eval": {"evaluators": {"length": "tests.processes.fragile:length"}},
            "trainer_adapters": {
                "lm_server": {"_type": "lm_server", "base_url": "http://127.0.0.1:9", "api_key": SECRET}
            },
            "storage": {"address": "s3://bucket/x", "options": {"key": "a", "secret": SECRET}},
        }
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", f"{SECRET}-judge")
    monkeypatch.setenv("POLICY_KEY", f"{SECRET}-policy")


def test_a_runner_elsewhere_reads_its_own_environment(monkeypatch: pytest.MonkeyPatch):
    data = config_to_json(
        config(api_key="${POLICY_KEY}", headers={"x-team": "of ${POLICY_KEY}"}), over_network=True
    )
    assert SECRET not in json.dumps(data)
    monkeypatch.setenv("POLICY_KEY", "the node's")
    policy: Any = config_from_json(data).llms["policy"]
    assert policy.api_key.get_secret_value() == "the node's"
    assert policy.headers["x-team"].get_secret_value() == "of the node's"
    assert config_from_json(data).storage is None


def test_a_variable_that_a_node_lacks_is_named_with_the_node(monkeypatch: pytest.MonkeyPatch):
    data = config_to_json(config(api_key="${POLICY_KEY}"), over_network=True)
    monkeypatch.delenv("POLICY_KEY")
    wanted = rf"{socket.gethostname()} .* lacks POLICY_KEY \(for llms.policy.api_key\)"
    with pytest.raises(RequestError, match=wanted):
        config_from_json(data)


def test_models_of_the_head_send_nothing(monkeypatch: pytest.MonkeyPatch):
    data = config_to_json(config(api_key=SECRET), over_network=True, at_head=["policy", "judge"])
    assert SECRET not in json.dumps(data)
    monkeypatch.delenv("JUDGE_KEY")
    assert config_from_json(data).llms.keys() == {"policy", "judge"}


def test_on_this_machine_values_are_sent_as_they_are():
    data = config_to_json(config(api_key=SECRET))
    assert SECRET in json.dumps(data)
    policy: Any = config_from_json(data).llms["policy"]
    assert policy.api_key.get_secret_value() == SECRET


@pytest.mark.parametrize(
    "text, elsewhere, lenient",
    [
        ("${SET}", "${SET}", "${SET:-no}"),
        ("${SET:-x}", "${SET}", "${SET:-no}"),
        ("${UNSET:-x$y}", "x$$y", "x$$y"),
        ("a $$ b", "a $$ b", "a $$ b"),
        ("Bearer ${SET}!", "Bearer ${SET}!", "Bearer ${SET:-no}!"),
    ],
)
def test_a_reference_means_elsewhere_what_it_means_here(text: str, elsewhere: str, lenient: str):
    assert portable_references(text, {"SET": "1"}, None) == elsewhere
    assert portable_references(text, {"SET": "1"}, "no") == lenient
    assert required_variables(elsewhere) == (["SET"] if "SET" in elsewhere else [])
    assert required_variables(lenient) == []


def test_a_secret_that_is_written_out_is_refused_by_its_name():
    with pytest.raises(RequestError, match=r"llms\.policy\.api_key is written out"):
        config_to_json(config(api_key=SECRET), over_network=True)
    whole = config()
    whole.workflow.arguments = {"service": {"password": SECRET}, "answer_key": "final_answer_v2"}
    with pytest.raises(RequestError, match=r"workflow\.arguments\.service\.password is written out"):
        config_to_json(whole, over_network=True)
