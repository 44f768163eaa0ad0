"""http where https belongs, and the reverse: the error says what to write."""

from __future__ import annotations

import pytest

from etude.core.call import ChatRequest
from etude.core.errors import EngineError
from etude.inference.openai_compatible import OpenAiEngine
from etude.inference.openai_config import OpenAiLlmConfig
from etude.wire.retries import Refused, failure_of
from tests.faults.remote_faults import FaultyEndpoint


async def said(url: str) -> str:
    engine = OpenAiEngine(OpenAiLlmConfig(model_name="tiny", base_url=url, retry_wait=0.001))
    with pytest.raises(EngineError) as caught:
        await engine.complete(ChatRequest(({"role": "user", "content": "x"},)))
    await engine.close()
    return str(caught.value)


async def test_plain_http_behind_https() -> None:
    async with FaultyEndpoint().serving() as endpoint:
        error = await said(endpoint.url("well").replace("http://", "https://"))
    assert "the server speaks plain HTTP: write http:// in place of https:// in the address" in error


def test_servers_that_say_it_themselves() -> None:
    told = b"Client sent an HTTP request to an HTTPS server.\n"
    failure = failure_of(400, {}, told)
    assert isinstance(failure, Refused) and not failure.impossible
    assert "write https:// in place of http://" in str(failure)
