"""Whose address and whose key a hosted backend gets."""

from __future__ import annotations

import pytest

from etude.backends.openai_adapter import OpenAiAdapterConfig
from etude.backends.openai_api import connect
from etude.core.errors import RequestError
from etude.inference.openai_config import OpenAiLlmConfig

THERE, ELSEWHERE = "http://there.invalid/v1", "http://elsewhere.invalid/v1"


def connected(adapter, llm, needs_key=False):
    client = connect(
        OpenAiAdapterConfig(**adapter), OpenAiLlmConfig(model_name="m", **llm), needs_key=needs_key
    )
    return str(client.base_url).rstrip("/"), client.api_key


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.mark.parametrize(
    ("adapter", "llm", "expected"),
    [
        ({}, {}, ("https://api.openai.com/v1", "sk-environment")),
        ({}, {"base_url": THERE, "api_key": "sk-model"}, (THERE, "sk-model")),
        ({"api_key": "sk-mine"}, {"base_url": THERE, "api_key": "sk-model"}, (THERE, "sk-mine")),
        ({"base_url": THERE}, {"base_url": THERE, "api_key": "sk-model"}, (THERE, "sk-model")),
        ({"base_url": ELSEWHERE}, {"base_url": THERE, "api_key": "sk-model"}, (ELSEWHERE, "none")),
    ],
)
def test_what_is_left_out_is_the_models_and_its_key_goes_nowhere_else(adapter, llm, expected):
    assert connected(adapter, llm) == expected


def test_an_address_of_its_own_takes_the_environments_key_where_it_needs_one():
    found = connected({"base_url": ELSEWHERE}, {"base_url": THERE, "api_key": "sk-model"}, needs_key=True)
    assert found == (ELSEWHERE, "sk-environment")


def test_without_a_key_it_says_where_one_is_missing(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(RequestError, match=r"no key for https://api\.openai\.com/v1: set OPENAI_API_KEY"):
        connected({}, {}, needs_key=True)
    assert connected({}, {"base_url": THERE}) == (THERE, "none")


def test_an_address_with_a_secret_in_it_is_refused():
    with pytest.raises(ValueError, match="use `api_key`"):
        OpenAiAdapterConfig(base_url="http://user:secret@there.invalid/v1")
