from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import openai
import pytest

from etude.wire.answers import RecordedCompletion
from etude.wire.dialect import ChatBody
from etude.wire.endpoint import Endpoint, EndpointServer
from tests.wire.dialects import ASK, Scripted, openai_client


async def ask(endpoint: Endpoint, **options) -> str | None:
    async with openai_client(endpoint) as client:
        answer = await client.chat.completions.create(model="m", messages=ASK, **options)
        return answer.choices[0].message.content


async def test_each_key_reaches_its_own_episode(server: EndpointServer) -> None:
    one, two = server.open(Scripted("one")), server.open(Scripted("two"))
    assert one.base_url == two.base_url and one.api_key != two.api_key
    assert one.base_url.startswith("http://127.0.0.1:")
    assert await asyncio.gather(ask(one), ask(two), ask(one)) == ["one", "two", "one"]


async def test_a_key_that_was_revoked_or_made_up_is_refused(server: EndpointServer) -> None:
    endpoint = server.open(Scripted("no"))
    other = server.open(Scripted("other"))
    name, secret = endpoint.api_key.split("-")[1], other.api_key.split("-", 2)[2]
    server.revoke(endpoint)
    for key in (endpoint.api_key, f"etude-{name}-{secret}", "etude-x-", "x", "", f"{other.api_key}x"):
        with pytest.raises(
            openai.AuthenticationError if key else Exception, match=r"not that of a running|api_key"
        ):
            await ask(Endpoint(endpoint.base_url, key))
    assert await ask(other) == "other"


def test_a_key_is_not_shown_when_an_endpoint_is_printed() -> None:
    assert "secret" not in repr(Endpoint("http://127.0.0.1:1/v1", "secret"))


async def test_only_the_chat_path_is_served(server: EndpointServer) -> None:
    endpoint = server.open(Scripted("x"))

    def get(path: str, key: str) -> tuple[int, dict[str, dict[str, str]]]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(endpoint.base_url + path, headers=headers)
        try:
            urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        raise AssertionError("expected an error")

    status, body = await asyncio.to_thread(get, "/models", endpoint.api_key)
    assert (status, body["error"]["code"]) == (404, "unknown_url")
    status, body = await asyncio.to_thread(get, "/docs", "")
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_after_closing_nobody_listens_and_it_can_start_again(server: EndpointServer) -> None:
    endpoint = server.open(Scripted("x"))
    port = int(endpoint.base_url.split(":")[2].split("/")[0])
    assert await ask(endpoint) == "x"
    await server.close()
    await server.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
    assert await ask(server.open(Scripted("again"))) == "again"


async def test_closing_does_not_wait_for_a_request_that_never_ends(server: EndpointServer) -> None:
    reached = asyncio.Event()

    async def never(body: ChatBody) -> RecordedCompletion:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    waiting = asyncio.ensure_future(ask(server.open(never)))
    await reached.wait()
    async with asyncio.timeout(60):
        await server.close()
    waiting.cancel()
    await asyncio.wait({waiting})
