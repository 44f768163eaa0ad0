"""How providers of OpenAI-compatible endpoints differ, as requests show it."""

from __future__ import annotations

import pytest

from etude.inference.openai_config import PROVIDERS, OpenAiLlmConfig, provider_at


def config(**settings) -> OpenAiLlmConfig:
    return OpenAiLlmConfig(**{"model_name": "m", **settings})


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://openrouter.ai/api/v1", "openrouter"),
        ("https://eu.openrouter.ai/api/v1", "openrouter"),
        ("https://notopenrouter.ai/api/v1", "other"),
        ("https://api.openai.com.invalid/v1", "other"),
        ("http://localhost:8000/v1", "other"),
    ],
)
def test_a_provider_is_known_by_its_address(url, name):
    assert provider_at(url).name == name
    assert config(base_url=url).provider_there.name == name


def test_without_an_address_it_is_openai_unless_the_environment_says_otherwise(monkeypatch):
    assert config().provider_there.name == "openai"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1/")
    assert (config().provider_there.name, config().address) == ("other", "http://localhost:8000/v1")


def test_a_provider_can_be_named():
    assert config(base_url="http://localhost:1/v1", provider="vllm").provider_there is PROVIDERS["vllm"]


@pytest.mark.parametrize(
    ("settings", "token_ids", "logprobs"),
    [
        ({}, False, True),
        ({"provider": "openrouter"}, False, False),
        ({"provider": "openrouter", "logprobs": True}, False, True),
        ({"provider": "vllm"}, True, True),
        ({"provider": "etude"}, True, True),
        ({"provider": "etude", "return_token_ids": False, "logprobs": False}, False, False),
        ({"base_url": "http://localhost:1/v1"}, False, True),
        ({"base_url": "http://localhost:1/v1", "return_token_ids": True}, True, True),
        ({"model_name": "o4-mini-2025-04-16"}, False, False),
        ({"model_name": "ft:o4-mini-2025-04-16:org::abc"}, False, False),
    ],
)
def test_what_is_asked_for_is_what_the_provider_tells(settings, token_ids, logprobs):
    found = config(**settings)
    assert (found.asks_for_token_ids, found.asks_for_logprobs) == (token_ids, logprobs)


@pytest.mark.parametrize(
    ("model", "thinks"),
    [
        ("o1", True),
        ("o3-mini", True),
        ("gpt-5-2025-08-07", True),
        ("gpt-5-chat-latest", False),
        ("gpt-4o-mini", False),
        ("o1000", False),
        ("ft:gpt-4o:org::o1", False),
    ],
)
def test_models_that_think_are_known_by_their_names(model, thinks):
    assert PROVIDERS["openai"].thinks(model) is thinks
    assert not PROVIDERS["vllm"].thinks(model)
