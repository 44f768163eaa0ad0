"""Answers reach their clients while they are sampled, in the words of every API."""

from __future__ import annotations

import asyncio

import openai
import pytest

from etude.core.call import Completion, Delta, Usage
from etude.core.errors import EngineError, EpisodeError, RequestError
from etude.wire.answers import Heading, RecordedCompletion
from etude.wire.dialect import ChatBody
from etude.wire.endpoint import EndpointServer
from etude.wire.gateway import recording_client
from tests.wire.dialects import ASK, CALLING, anthropic_client, openai_client

PIECES = [
    Delta("", "Hm", (1,), (-0.1,), ((),), (7, 8)),
    Delta("", ".", (2,), (-0.2,), ((),)),
    Delta("So", "", (3,), (-0.3,), ((),)),
]


class Slow:
    """Gives its pieces, then waits until it is let go, and ends with more text and a call of a tool."""

    def __init__(self, *, fails: bool = False) -> None:
        self.go = asyncio.Event()
        self.ended = asyncio.Event()
        self._fails = fails

    async def __call__(self, body: ChatBody) -> RecordedCompletion:
        heading = Heading("chatcmpl-1", "policy")
        for piece in PIECES:
            assert body.on_delta is not None
            body.on_delta(heading, piece)
        await self.go.wait()
        if self._fails:
            raise EngineError("the engine broke")
        self.ended.set()
        message = {**CALLING, "content": "So be it", "reasoning_content": "Hm."}
        return RecordedCompletion(
            heading.id,
            heading.model,
            completion=Completion(
                message,
                "tool_calls",
                prompt_ids=(7, 8),
                completion_ids=(1, 2, 3, 4),
                logprobs=(-0.1, -0.2, -0.3, -0.4),
                usage=Usage(2, 4),
            ),
        )


async def test_chat_completions_come_as_they_are_sampled(server: EndpointServer) -> None:
    handler, texts, thoughts, chunks = Slow(), "", "", []
    async with openai_client(server.open(handler)) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=ASK,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        async for chunk in stream:
            chunks.append(chunk)
            for choice in chunk.choices:
                texts += choice.delta.content or ""
                thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            if texts == "So" and not handler.go.is_set():
                assert thoughts == "Hm." and not handler.ended.is_set()
                handler.go.set()
    assert (texts, thoughts) == ("So be it", "Hm.")
    assert chunks[0].model_dump()["prompt_token_ids"] == [7, 8]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [token for choice in choices for token in choice.model_dump()["token_ids"]] == [1, 2, 3, 4]
    logprobs = [token.logprob for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert logprobs == [-0.1, -0.2, -0.3, -0.4]
    assert choices[-1].finish_reason == "tool_calls"
    assert [call.function.name for choice in choices for call in choice.delta.tool_calls or ()] == ["add"]
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 6


async def test_responses_come_as_they_are_sampled(server: EndpointServer) -> None:
    handler, events = Slow(), []
    async with (
        openai_client(server.open(handler)) as client,
        client.responses.stream(model="m", input="hi") as stream,
    ):
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                handler.go.set()
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "So be it"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert deltas == ["Hm", "."]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert done.text == "So be it"


async def test_messages_come_as_they_are_sampled(server: EndpointServer) -> None:
    handler, kinds = Slow(), []
    async with (
        anthropic_client(server.open(handler)) as client,
        client.messages.stream(model="m", max_tokens=9, messages=ASK) as stream,
    ):
        async for event in stream:
            if event.type == "content_block_delta":
                kinds.append(event.delta.type)
                if event.delta.type == "text_delta":
                    handler.go.set()
        final = await stream.get_final_message()
    assert kinds == ["thinking_delta", "thinking_delta", "text_delta", "text_delta", "input_json_delta"]
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert (final.content[0].thinking, final.content[1].text) == ("Hm.", "So be it")
    assert (final.content[2].input, final.stop_reason) == ({"a": 1, "b": 2}, "tool_use")
    assert (final.usage.input_tokens, final.usage.output_tokens) == (2, 4)


async def test_a_stream_that_fails_half_way_is_an_error_of_the_client() -> None:
    handler = Slow(fails=True)
    stream = await recording_client(handler).chat.completions.create(model="m", messages=ASK, stream=True)
    handler.go.set()
    with pytest.raises(openai.APIError, match="the engine broke"):
        async for _ in stream:
            pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("not that"), openai.InternalServerError),
        (RequestError("not that"), openai.BadRequestError),
        (EpisodeError("not that"), openai.ConflictError),
    ],
)
async def test_errors_are_the_sdks_and_are_not_retried(error: Exception, kind: type) -> None:
    asked = 0

    async def handler(body: ChatBody) -> RecordedCompletion:
        nonlocal asked
        asked += 1
        raise error

    client = recording_client(handler).with_options(max_retries=2)
    with pytest.raises(kind, match="not that") as raised:
        await client.chat.completions.create(model="m", messages=ASK)
    assert raised.value.response.headers["x-etude-error"] == type(error).__name__
    assert asked == 1


async def test_an_answer_whose_client_hangs_up_is_sampled_to_its_end(server: EndpointServer) -> None:
    handler = Slow()
    async with openai_client(server.open(handler)) as client:
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        await anext(aiter(stream))
        await stream.close()
    handler.go.set()
    async with asyncio.timeout(60):
        await handler.ended.wait()


async def test_several_answers_are_asked_for_one_by_one() -> None:
    asked: list[ChatBody] = []

    async def handler(body: ChatBody) -> RecordedCompletion:
        asked.append(body)
        said = Completion({"role": "assistant", "content": str(body.choice)}, usage=Usage(3, 1))
        return RecordedCompletion(f"chatcmpl-{body.choice}", "policy", completion=said)

    client = recording_client(handler)
    answer = await client.chat.completions.create(model="m", messages=ASK, n=3)
    assert [choice.message.content for choice in answer.choices] == ["0", "1", "2"]
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(model="m", messages=ASK, n=2, stream=True)
    ]
    texts = {
        choice.index: choice.delta.content for c in chunks for choice in c.choices if choice.delta.content
    }
    assert texts == {0: "0", 1: "1"} and len({chunk.id for chunk in chunks}) == 1
    texts_of = await client.completions.create(model="m", prompt=["a", "b"], n=2)
    assert [choice.text for choice in texts_of.choices] == ["0", "1", "0", "1"]
    assert [body.prompt for body in asked[-4:]] == ["a", "a", "b", "b"]
    assert texts_of.usage is not None and texts_of.usage.prompt_tokens == 6
