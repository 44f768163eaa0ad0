"""The endpoint of a recorded model: its own messages are known again, and long work holds nobody up."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.message import Message
from etude.wire.dialect import AnswerMemory, ChatBody, Dialect, RecordedCompletion
from etude.wire.gateway import Gateway
from etude.wire.http_server import Endpoint, EndpointServer
from etude.wire.messages import MessagesDialect
from etude.wire.responses import ResponsesDialect
from tests.wire.dialects import ASK, Scripted, completion, openai_client


async def ask(endpoint: Endpoint, **options) -> str | None:
    async with openai_client(endpoint) as client:
        answer = await client.chat.completions.create(model="m", messages=ASK, **options)
        return answer.choices[0].message.content


async def test_a_key_that_was_revoked_or_made_up_is_refused(server: EndpointServer) -> None:
    endpoint = server.open(Scripted("no"))
    other = server.open(Scripted("other"))
    mixed = endpoint.api_key[:20] + other.api_key[20:]
    server.revoke(endpoint)
    for key in (endpoint.api_key, mixed, "etude-x-", "x", "", f"{other.api_key}x"):
        with pytest.raises(
            openai.AuthenticationError if key else Exception, match=r"no running episode|api_key"
        ):
            await ask(Endpoint(endpoint.base_url, key))
    assert await ask(other) == "other"


def test_a_key_is_not_shown_when_an_endpoint_is_printed() -> None:
    assert "secret" not in repr(Endpoint("http://127.0.0.1:1/v1", "secret"))


async def test_only_the_paths_of_the_apis_are_served(server: EndpointServer) -> None:
    endpoint = server.open(Scripted("x"))
    key = {"authorization": f"Bearer {endpoint.api_key}"}
    async with httpx.AsyncClient(base_url=endpoint.base_url) as http:
        for path, headers, expected in (
            ("/models", key, (404, "unknown_url")),
            ("/docs", {}, (401, "invalid_api_key")),
        ):
            reply = await http.get(path, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == expected


async def test_after_closing_nobody_listens_and_it_can_start_again(server: EndpointServer) -> None:
    endpoint = server.open(Scripted("x"))
    port = int(endpoint.base_url.split(":")[2].split("/")[0])
    assert await ask(endpoint) == "x"
    await server.close()
    await server.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
    assert await ask(server.open(Scripted("again"))) == "again"


async def test_an_endpoint_that_is_opened_while_the_server_closes_is_served(server: EndpointServer) -> None:
    server.open(Scripted("x"))
    closing = asyncio.ensure_future(server.close())
    await asyncio.sleep(0)
    endpoint = server.open(Scripted("again"))
    await closing
    assert await ask(endpoint) == "again"


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


arguments = st.one_of(
    st.text(max_size=8),
    st.sampled_from(['{"a":1,  "b":2}', "{}", "[1]", "null", '{"raw_arguments": "x"}', '{"a": 1, "a": 2}']),
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    names = draw(st.lists(st.sampled_from(["add", "look"]), max_size=3))
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": draw(arguments)}}
        for place, name in enumerate(names)
    ]
    text = draw(st.one_of(st.none(), st.text(max_size=8)) if calls else st.text(max_size=8))
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def responses_request(wire: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "input": [*ASK, *wire["output"], *ASK]}


def messages_request(wire: dict[str, Any]) -> dict[str, Any]:
    said = {"role": "assistant", "content": wire["content"]}
    return {"model": "m", "max_tokens": 9, "messages": [*ASK, said, *ASK]}


DIALECTS = [(ResponsesDialect, responses_request), (MessagesDialect, messages_request)]


@pytest.mark.parametrize(("dialect_type", "request_with"), DIALECTS)
@given(said=messages())
def test_an_answer_that_is_sent_back_is_the_one_that_was_recorded(dialect_type, request_with, said):
    dialect: Dialect = dialect_type(AnswerMemory())
    recorded = RecordedCompletion("chatcmpl-1", "policy", completion=completion(said))
    wire = dialect.reply([recorded], ChatBody("m", tuple(ASK), created=1))
    assert dialect.parse(request_with(wire)).messages == (*ASK, said, *ASK)


class Patient:
    """A template that has its prompt once the loop has turned."""

    def __init__(self) -> None:
        self.turned = threading.Event()
        self.template = SimpleNamespace(prompt=lambda request: SimpleNamespace(ids=self._ids()))

    def _ids(self) -> list[int]:
        assert self.turned.wait(10), "the loop did not turn"
        return [1, 2]

    def models(self) -> list[dict[str, Any]]:
        return []

    @asynccontextmanager
    async def reader(self, model: str) -> AsyncIterator[Patient]:
        asyncio.get_running_loop().call_later(0.01, self.turned.set)
        yield self


async def test_the_loop_turns_while_a_long_prompt_is_tokenised() -> None:
    async def nobody(asked: Any) -> Any:
        raise AssertionError

    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 100_000}]}).encode()
    answer = await Gateway(nobody, readers=Patient()).answer("POST", "/v1/v1/messages/count_tokens", {}, body)
    assert (answer.status_code, json.loads(answer.body)) == (200, {"input_tokens": 2})
