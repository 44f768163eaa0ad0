"""Several addresses for one model: real servers that die, hang, talk nonsense, and come back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError, ImpossibleCall
from etude.core.job import ModelVersion
from etude.engines import http_addresses
from etude.engines.openai_compatible import OpenAiEngine
from etude.engines.openai_config import OpenAiLlmConfig, provider_at
from etude.wire.retries import counting_retries
from tests.endpoint_process import EndpointProcess
from tests.support import pass_time, until

SETTINGS = {"model_name": "tiny", "logprobs": False, "retry_wait": 0.01, "request_timeout": 600.0}
EPISODES = [f"train/0/{number}" for number in range(12)]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EndpointProcess]]:
    processes = [EndpointProcess(name) for name in ("one", "two", "three")]
    for process in processes:
        process.start()
    yield processes
    for process in processes:
        process.kill()


@pytest.fixture
def servers(processes: list[EndpointProcess], monkeypatch: pytest.MonkeyPatch) -> list[EndpointProcess]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(http_addresses, "_PROBE_SECONDS", 600.0)
    for process in processes:
        try:
            process.behave("well", models=None, asked=[])
        except OSError:
            process.kill()
            process.start()
    return processes


@pytest.fixture
async def engine(servers: list[EndpointProcess]) -> AsyncIterator[OpenAiEngine]:
    engine = make_engine(servers)
    yield engine
    await engine.close()


def make_engine(servers: list[EndpointProcess], **fields: Any) -> OpenAiEngine:
    settings = SETTINGS | {"base_url": [server.url for server in servers], "api_key": "sk-secret"}
    return OpenAiEngine(OpenAiLlmConfig.model_validate(settings | fields))


async def ask(engine: OpenAiEngine, episode: str) -> Completion:
    message = {"role": "user", "content": "hello"}
    return await engine.complete(ChatRequest(messages=(message,), conversation=episode))


async def homes(engine: OpenAiEngine, episodes: list[str] = EPISODES) -> dict[str, str]:
    """Who answers each of the episodes; the answer and the record of the call agree."""
    answers = await asyncio.gather(*(ask(engine, episode) for episode in episodes))
    return {episode: answer.address for episode, answer in zip(episodes, answers, strict=True)}


def under_way(engine: OpenAiEngine) -> dict[str, int]:
    """How many calls each address has to answer that has any."""
    return {each.url: each.calls for each in engine._addresses.routes.addresses if each.calls}


def aside(engine: OpenAiEngine) -> dict[str, str]:
    """The addresses that are set aside, and why."""
    return {each.url: each.reason for each in engine._addresses.routes.addresses if each.is_aside}


def at(servers: list[EndpointProcess], url: str) -> EndpointProcess:
    return next(server for server in servers if server.url == url)


async def test_episodes_are_shared_out_and_stay(engine, servers):
    before = await homes(engine)
    assert set(before.values()) == {server.url for server in servers}
    assert await homes(engine) == before
    answer = await ask(engine, EPISODES[0])
    assert answer.message["content"] == at(servers, before[EPISODES[0]]).name, "who answered is on record"


async def test_a_router_is_told_which_calls_belong_together_and_nothing_of_the_episode(servers):
    engine = make_engine(servers[:1], provider="vllm")
    await homes(engine, EPISODES * 2)
    sessions = [call["session"] for call in servers[0].asked()]
    assert len(set(sessions)) == len(EPISODES) and not any("train" in session for session in sessions)
    await engine.close()


async def test_a_killed_address_moves_its_own_episodes_and_is_used_again_when_it_is_back(
    engine, servers, caplog
):
    before = await homes(engine)
    lost = servers[0]
    lost.kill()
    with counting_retries() as count:
        after = await homes(engine)
    own = {episode for episode, url in before.items() if url == lost.url}
    assert own and {episode for episode in before if after[episode] != before[episode]} == own
    assert 0 < count.retries <= len(own)
    with counting_retries() as count:
        assert await homes(engine) == after
    assert count.retries == 0, "the set-aside address is asked no more"
    assert aside(engine)[lost.url].startswith("ConnectError")
    assert caplog.text.count(f"{lost.url} is set aside: ConnectError") == 1
    lost.start()
    await until(lambda: not aside(engine))
    assert f"{lost.url} can be used again" in caplog.text
    newcomers = [f"new {number}" for number in range(6)]
    assert lost.url in (await homes(engine, newcomers)).values()
    assert await homes(engine) == after, "a conversation that moved stays where its prefix is cached now"


@pytest.mark.parametrize(
    ("mode", "cause"), [("500", "HTTP 500: mode 500"), ("hang", "no answer within 600 s")]
)
async def test_an_address_that_answers_badly_costs_no_call(engine, servers, caplog, mode, cause):
    before = await homes(engine)
    bad = servers[1]
    bad.behave(mode)
    for turn in range(3):
        asking = asyncio.create_task(homes(engine, [*EPISODES, *(f"turn {turn} {n}" for n in range(6))]))
        if mode == "hang" and turn == 0:
            await until(lambda: set(under_way(engine)) == {bad.url})
            pass_time(600.0)
        after = await asking
        assert bad.url not in after.values()
    kept = {episode: url for episode, url in before.items() if url != bad.url}
    assert after == after | kept
    assert f"{bad.url} is set aside: {cause}" in caplog.text
    bad.behave("well")
    pass_time(600.0)
    await until(lambda: not aside(engine))
    assert bad.url in (await homes(engine, [f"new {number}" for number in range(6)])).values()


async def test_when_all_are_down_the_cause_of_each_is_told_and_the_first_back_is_used(servers):
    engine = make_engine(servers[:2], max_retries=1)
    await homes(engine)
    servers[0].kill()
    servers[1].behave("401")
    with pytest.raises(EngineError) as caught:
        await ask(engine, "a")
    told = str(caught.value)
    # What is told depends on whether the connection that was open had been seen to end.
    assert f"{servers[0].url}: " in told and re.search("ConnectError|RemoteProtocolError", told)
    assert f"{servers[1].url}: " in told and "HTTP 401: mode 401" in told and "2 addresses" in told
    servers[0].start()
    answer = await ask(engine, "a")
    assert answer.address == servers[0].url
    await engine.close()


async def test_a_request_that_is_at_fault_itself_is_refused_at_once(engine, servers):
    for server in servers:
        server.behave("400")
    with pytest.raises(ImpossibleCall, match="HTTP 400"):
        await ask(engine, "a")
    assert sum(len(server.asked()) for server in servers) == 1
    assert aside(engine) == {}


V3 = ModelVersion(number=3, location="tiny-v3", digest="d")


async def test_a_version_counts_where_it_is_loaded_and_an_address_without_it_waits(engine, servers):
    before = await homes(engine)
    late = servers[0]
    for server in servers[1:]:
        server.behave(models=["tiny", "tiny-v3"])
    late.behave(models=["tiny"], asked=[])
    await engine.adopt(V3)
    answers = await asyncio.gather(*(ask(engine, episode) for episode in EPISODES))
    assert {answer.model_version for answer in answers} == {3}
    assert {*aside(engine)} == {late.url} and late.url in before.values()
    await until(lambda: "does not have the model 'tiny-v3'; its models: tiny" in aside(engine)[late.url])
    assert late.url not in {answer.address for answer in answers}
    late.behave(models=["tiny", "tiny-v3"])
    await until(lambda: not aside(engine))
    after = await homes(engine, [f"new {number}" for number in range(6)])
    assert late.url in after.values() and {call["model"] for call in late.asked()} == {"tiny-v3"}


async def test_an_answer_of_other_weights_is_never_recorded(engine, servers):
    await homes(engine)
    for server in servers:
        server.behave(models=["tiny", "tiny-v3"])
    await engine.adopt(V3)
    servers[0].behave("other")
    answers = await asyncio.gather(*(ask(engine, f"later {number}") for number in range(12)))
    assert {answer.model_version for answer in answers} == {3}
    assert {answer.address for answer in answers} == {server.url for server in servers[1:]}
    assert (
        "the model 'another' answered in place of 'tiny-v3'" in engine._addresses.routes.addresses[0].reason
    )


async def test_addresses_are_a_list_or_a_text_with_commas(monkeypatch):
    def addresses(**fields: Any) -> list[str]:
        return OpenAiLlmConfig.model_validate({"model_name": "tiny"} | fields).addresses

    several = ["http://a/v1", "http://b/v1"]
    assert addresses(base_url=several) == several
    assert addresses(base_url="http://a/v1/, http://b/v1") == several
    assert addresses(base_url=["http://a/v1"]) == ["http://a/v1"]
    monkeypatch.setenv("OPENAI_BASE_URL", "http://a/v1,http://b/v1/")
    assert addresses() == several


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"base_url": []}, "at least one address"),
        ({"base_url": ["http://a/v1", "http://a/v1/"]}, "has an address twice: http://a/v1"),
        ({"base_url": ["http://a/v1", "b"]}, "expected an address like"),
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
    assert provider_at(url).name == name
    assert config(base_url=url).provider_there.name == name


def test_without_an_address_it_is_openai_unless_the_environment_says_otherwise(monkeypatch):
    assert config().provider_there.name == "openai"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1/")
    assert (config().provider_there.name, config().address) == ("other", "http://localhost:8000/v1")


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
        ({"model_name": "gpt-5-chat-latest"}, False, True),
    ],
)
def test_what_is_asked_for_is_what_the_provider_tells(settings, token_ids, logprobs):
    found = config(**settings)
    assert (found.asks_for_token_ids, found.asks_for_logprobs) == (token_ids, logprobs)
