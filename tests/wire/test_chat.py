"""Chat completions of a recorded model, settings of sampling, and answers that are streamed in every API."""

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage

from etude.core.call import Completion, Constraint, Delta, Sampling, Usage
from etude.core.errors import EngineError, EpisodeError, RequestError
from etude.wire.chat import ChatDialect, CompletionsDialect
from etude.wire.dialect import AnswerHeader, AnswerMemory, ChatBody, RecordedCompletion
from etude.wire.gateway import recording_client
from etude.wire.http_server import EndpointServer
from etude.wire.request_body import change_sampling, plain_messages
from tests.support import tool_call
from tests.wire.dialects import ASK, CALLING, openai_client

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

CHAT = ChatDialect(AnswerMemory())

texts = st.text(max_size=10)
wire_calls = st.builds(
    lambda name, raw, index: tool_call(name, raw, id=f"call_{index}")["tool_calls"][0],
    texts,
    texts,
    st.integers(0, 9),
)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    calls = draw(st.lists(wire_calls, max_size=3))
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | texts)}
    if calls:
        message["tool_calls"] = calls
    ids = draw(st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple))
    logprobs = draw(st.none() | st.tuples(*[st.floats(max_value=0, allow_nan=False)] * len(ids or ())))
    return Completion(
        message=message,
        finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])),
        prompt_ids=draw(st.none() | st.just((1, 2))),
        completion_ids=ids,
        logprobs=logprobs,
        usage=Usage(draw(st.integers(0, 99)), draw(st.integers(0, 99))),
    )


bodies = st.builds(
    ChatBody,
    model=st.just("m"),
    messages=st.just(()),
    include_usage=st.booleans(),
    logprobs=st.booleans(),
    return_token_ids=st.booleans(),
)


@given(completions(), bodies)
def test_an_answer_and_its_stream_are_what_the_sdk_says(completion: Completion, body: ChatBody) -> None:
    recorded = RecordedCompletion("id", "m", completion=completion)
    reply, stream = CHAT.reply([recorded], body), CHAT.stream(body)
    events = [*stream.add(0, recorded, Delta()), *stream.end(reply)]
    *wire, end = json.loads(json.dumps([data for _, data in events]))
    assert end == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in wire]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == (completion.message["content"] or "")
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    expected = completion.message.get("tool_calls") or []
    assert [(call.index, call.id) for call in calls] == [(i, wire["id"]) for i, wire in enumerate(expected)]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [completion.finish_reason]
    answer = ChatCompletion.model_validate(json.loads(json.dumps(reply)), strict=True)
    assert answer.choices[0].message.content == completion.message["content"]
    whole = reply["choices"][0]["logprobs"]
    if body.logprobs and completion.logprobs is not None:
        expected = [max(logprob, -9999.0) for logprob in completion.logprobs]
        assert [token["logprob"] for token in whole["content"]] == expected
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [piece.model_dump() for piece in streamed] == ([whole] if whole and whole["content"] else [])
    assert (chunks[-1].usage is not None) == body.include_usage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "one form"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs: give one of"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "no tool 'add'"),
        ({"constraint": {"kind": "regex", "__main__": []}}, "parameter 'constraint' is not supported"),
        ({"messages": []}, "messages: .* at least 1"),
        ({"tools": [{"name": "add"}]}, "function: Field required"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        CHAT.parse({**ASKED, **change})


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
AS_SCHEMA = Constraint("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("form", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            AS_SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, AS_SCHEMA),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint("choice", '["a", "b"]')),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, AS_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint("grammar", 'start: "a"')),
    ],
)
def test_the_form_of_an_answer_is_a_constraint(form: dict[str, Any], constraint: Constraint | None) -> None:
    assert CHAT.parse({**ASKED, **form}).sampling.get("constraint") == constraint


def test_every_parameter_of_sampling_is_read() -> None:
    given = {"top_k": -1, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [5], "logit_bias": {"7": -2}}
    given |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.2}
    asked = CHAT.parse(
        {**ASKED, **given, "reasoning_effort": "none", "chat_template_kwargs": {"b": 1}, "thread": "t"}
    )
    expected = {**given, "top_k": 0, "stop_token_ids": (5,), "logit_bias": ((7, -2.0),)}
    assert asked.sampling == expected
    assert asked.template_options == {"reasoning_effort": "none", "b": 1}


def test_sdk_messages_become_the_dicts_that_were_sent() -> None:
    message = ChatCompletionMessage(role="assistant", content=None, tool_calls=None)
    assert plain_messages([message, {"role": "user", "content": "x", "name": None}]) == (
        {"role": "assistant", "content": None},
        {"role": "user", "content": "x"},
    )


def test_what_is_given_changes_and_the_rest_stays() -> None:
    base = Sampling(temperature=0.7, max_tokens=10, seed=3)
    assert change_sampling(base, {}) is base
    assert change_sampling(base, {"temperature": None}) is base
    changed = change_sampling(base, {"temperature": 0, "stop": "x", "top_p": 0.5, "max_tokens": 5, "seed": 0})
    assert changed == Sampling(0.0, 0.5, 5, ("x",), 0)
    assert change_sampling(base, {"stop": ["a", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature: .* 0, found -0.1"),
        ({"temperature": True}, "temperature: .* number, found True"),
        ({"temperature": float("nan")}, "temperature: .* finite number"),
        ({"top_z": 3}, "'top_z' .*: temperature, top_p"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        change_sampling(Sampling(), changes)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], 3, [3], {"a": 1}, ["x"] * 129])
def test_stops_are_texts(stop: Any) -> None:
    """The error says which field, what is to be given, and what was found."""
    told = rf"stop: .* 128, .*, found {re.escape(f'{stop!r:.80}')}"
    for ask in (
        lambda: change_sampling(Sampling(), {"stop": stop}),
        lambda: CHAT.parse({**ASKED, "stop": stop}),
    ):
        with pytest.raises(RequestError, match=f"^{told}$") as raised:
            ask()
        assert raised.value.param == "stop"


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
        heading = AnswerHeader("chatcmpl-1", "policy")
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


def test_an_endpoint_that_continues_a_prompt_with_nothing_gives_an_empty_text() -> None:
    empty = RecordedCompletion("id", "m", completion=Completion({"role": "assistant", "content": None}))
    reply = CompletionsDialect(AnswerMemory()).reply([empty], ChatBody("m", ()))
    assert reply["choices"][0]["text"] == ""


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
