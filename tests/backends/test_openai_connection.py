"""Whose address and whose key a hosted backend gets."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
from pydantic import ValidationError

from etude.backends import openai_api
from etude.backends.openai_api import api_errors, connect
from etude.backends.openai_jobs import OpenAiAdapter, OpenAiAdapterConfig
from etude.core.errors import BackendError, RequestError
from etude.engines.openai_compatible import OpenAiLlmConfig
from etude.wire.retries import RetryPolicy
from tests.backends.openai_stand_in import BASE, KEY, StandIn
from tests.backends.test_openai_jobs import imitations
from tests.remote_faults import FAULTS, FaultyEndpoint

THERE, ELSEWHERE = "http://there.invalid/v1", "http://elsewhere.invalid/v1"
OWN = {"base_url": THERE, "api_key": "sk-model"}


def address_and_key(adapter, llm, needs_key=False):
    client = connect(
        OpenAiAdapterConfig(**adapter), OpenAiLlmConfig(model_name="m", **llm), needs_key=needs_key
    )
    return str(client.base_url).rstrip("/"), client.api_key


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.mark.parametrize(
    ("adapter", "llm", "needs_key", "expected"),
    [
        ({}, {}, False, ("https://api.openai.com/v1", "sk-environment")),
        ({}, OWN, False, (THERE, "sk-model")),
        ({"api_key": "sk-mine"}, OWN, False, (THERE, "sk-mine")),
        ({"base_url": THERE}, OWN, False, (THERE, "sk-model")),
        ({"base_url": ELSEWHERE}, OWN, False, (ELSEWHERE, "none")),
        ({"base_url": ELSEWHERE}, OWN, True, (ELSEWHERE, "sk-environment")),
    ],
)
def test_what_is_left_out_is_the_models_and_its_key_goes_nowhere_else(adapter, llm, needs_key, expected):
    assert address_and_key(adapter, llm, needs_key) == expected


def test_without_a_key_it_says_where_one_is_missing(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(RequestError, match=r"no key for https://api\.openai\.com/v1: set OPENAI_API_KEY"):
        address_and_key({}, {}, needs_key=True)
    assert address_and_key({}, {"base_url": THERE}) == (THERE, "none")


@asynccontextmanager
async def open_adapter(url):
    config = OpenAiAdapterConfig(api_key=KEY)
    client = connect(config, OpenAiLlmConfig(model_name=BASE, base_url=url), needs_key=True)
    yield OpenAiAdapter(config, client, BASE)
    await client.close()


async def test_answers_over_real_sockets_are_read_up_to_a_limit():
    """And the SDK goes on with the client that limits them."""
    stand_in = StandIn()
    with stand_in.serve() as url:
        async with open_adapter(url) as adapter:
            await adapter.check()
            stand_in.say = lambda model, number: "x" * (33 * 2**20)
            with pytest.raises(BackendError, match=r"larger than 32 MB"), api_errors(adapter.client):
                await adapter.client.chat.completions.create(model=BASE, messages=[])


async def test_each_fault_of_an_api_is_a_backend_error_that_says_what_it_was(monkeypatch):
    """Whether there is no answer, or one to something else: the SDK takes any JSON for what it asked for."""

    async def call(endpoint, fault):
        monkeypatch.setattr(openai_api, "REQUEST_SECONDS", 0.5 if FAULTS[fault].kind == "slow" else 60.0)
        async with open_adapter(endpoint.url(fault)) as adapter:
            adapter.retry_policy = RetryPolicy(retries=0)
            with pytest.raises(BackendError) as error:
                await adapter.find("a job")
            assert not await adapter.is_healthy()
            assert adapter.unhealthy_because is not None
        return str(error.value)

    async with FaultyEndpoint().serving() as endpoint, asyncio.timeout(100):
        answers = await asyncio.gather(*(call(endpoint, name) for name in FAULTS))
    errors = dict(zip(FAULTS, answers, strict=True))
    malformed = {name for name, error in errors.items() if "DecodingError: " in error}
    assert malformed >= {"empty", "204", "half-json", "html", "deep-json", "no-utf-8", "surrogate", "list"}
    late = {name for name, error in errors.items() if "answer in 0.5 s" in error}
    assert late == {name for name, fault in FAULTS.items() if fault.kind == "slow"}


@pytest.mark.parametrize("spoilt", [{"data": "none"}, [], {"data": [{}]}, {"id": None}])
async def test_an_answer_to_something_else_makes_nothing_a_second_time(spoilt, monkeypatch):
    """Of each request the first is done, and its answer spoilt: the SDK would read an empty list in it."""
    stand_in, came, answer = StandIn(), set(), StandIn.answer

    def spoiling(self, request):
        answered, name = answer(self, request), f"{request.method} {request.url.path}"
        is_first = name not in came
        came.add(name)
        return httpx.Response(200, json=spoilt) if is_first else answered

    monkeypatch.setattr(StandIn, "answer", spoiling)
    with stand_in.serve() as url:
        async with open_adapter(url) as adapter:
            ref = await adapter.submit(imitations())
            assert (await adapter.wait_until_complete(ref, 0.001)).status == "completed"
    assert (len(stand_in.files), len(stand_in.jobs)) == (1, 1)


def test_an_address_with_a_secret_in_it_is_refused():
    with pytest.raises(ValidationError, match="use `api_key`"):
        OpenAiAdapterConfig(base_url="http://user:secret@there.invalid/v1")
