from __future__ import annotations

import json

import httpx
import openai
import pytest

from etude.core.call import Completion, Usage
from etude.core.errors import EngineError, EpisodeError, RequestError
from etude.wire.answers import RecordedCompletion
from etude.wire.dialect import ChatBody
from etude.wire.gateway import recording_client
from tests.support import tool_call

ASK = [{"role": "user", "content": "hi"}]
SEEN: list[ChatBody] = []


def answering(completion: Completion | Exception):
    """A handler that keeps the requests it sees."""
    SEEN.clear()

    async def handler(body: ChatBody) -> RecordedCompletion:
        SEEN.append(body)
        if isinstance(completion, Exception):
            raise completion
        return RecordedCompletion("chatcmpl-1", "policy", completion=completion)

    return handler


HELLO = Completion(
    {"role": "assistant", "content": "hello"},
    completion_ids=(1, 2),
    logprobs=(-0.5, -0.25),
    usage=Usage(3, 2),
)


async def test_a_completion_comes_back_as_the_sdks_own_object() -> None:
    client = recording_client(answering(HELLO))
    answer = await client.chat.completions.create(model="m", messages=ASK, logprobs=True, temperature=0.5)
    assert isinstance(answer, openai.types.chat.ChatCompletion)
    assert (answer.id, answer.model) == ("chatcmpl-1", "policy")
    assert answer.choices[0].message.content == "hello"
    assert [token.logprob for token in answer.choices[0].logprobs.content] == [-0.5, -0.25]
    assert answer.usage.total_tokens == 5
    assert SEEN[0].sampling == {"temperature": 0.5}


async def test_a_stream_gives_the_same_text_logprobs_and_usage() -> None:
    client = recording_client(answering(HELLO))
    stream = await client.chat.completions.create(
        model="m", messages=ASK, stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[-1].usage.completion_tokens == 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


async def test_the_sdks_stream_helper_puts_the_pieces_together() -> None:
    wanted = Completion({**tool_call("add", {"a": 1}), "content": "calling"}, "tool_calls")
    client = recording_client(answering(wanted))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    async with client.chat.completions.stream(model="m", messages=ASK, tools=tools) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "calling"
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1}


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (EngineError("the prompt does not fit"), openai.InternalServerError, "the prompt does not fit"),
        (RequestError("no model 'x'"), openai.BadRequestError, "no model 'x'"),
        (EpisodeError("episode 1 is over"), openai.ConflictError, "episode 1 is over"),
    ],
)
async def test_errors_are_the_sdks_and_are_not_retried(error: Exception, kind: type, message: str) -> None:
    client = recording_client(answering(error)).with_options(max_retries=2)
    with pytest.raises(kind, match=message) as raised:
        await client.chat.completions.create(model="m", messages=ASK)
    assert raised.value.response.headers["x-etude-error"] == type(error).__name__
    assert len(SEEN) == 1


async def test_broken_json_is_refused() -> None:
    client = recording_client(answering(HELLO))
    response = await client._client.post("http://recorded.invalid/v1/chat/completions", content=b"{")
    assert isinstance(response, httpx.Response)
    assert response.status_code == 400
    assert "not JSON" in response.json()["error"]["message"]
