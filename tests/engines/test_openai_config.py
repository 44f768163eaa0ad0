"""The config of a model at an endpoint: its address, its provider, and what it is asked for."""

from __future__ import annotations

import pytest

from etude.core.call import ChatRequest
from etude.engines.openai_config import OpenAiLlmConfig
from etude.wire.client import conversation_key


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"base_url": "http://a/v1,http://b/v1"}, "put a router in front of several servers"),
        ({"base_url": "localhost:8000"}, "expected an address like"),
        ({"base_url": "http://me:pass@host/v1"}, "use `api_key`"),
        ({"extra_body": {"n": 2}}, "cannot set n"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        OpenAiLlmConfig.model_validate({"model_name": "tiny"} | fields)


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
    assert config(base_url=url).provider_there.name == name


def test_without_an_address_it_is_openai_unless_the_environment_says_otherwise(monkeypatch):
    assert config().provider_there.name == "openai"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1/")
    assert (config().provider_there.name, config().address) == ("other", "http://localhost:8000/v1")


def test_without_an_episode_the_beginning_says_what_belongs_together():
    system, question = {"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}
    answered = (system, question, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"})
    first = conversation_key(ChatRequest(messages=(system, question)))
    assert conversation_key(ChatRequest(messages=answered)) == first
    other = (system, {"role": "user", "content": "2 + 2?"})
    assert conversation_key(ChatRequest(messages=other)) != first
    assert conversation_key(ChatRequest(messages=other, conversation="train/3")) == "train/3"
    ids = tuple(range(300))
    prompts = [conversation_key(ChatRequest(messages=(), prompt=ids + more)) for more in ((), (7, 8))]
    assert prompts[0] == prompts[1]
