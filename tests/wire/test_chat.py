"""Chat completions of a recorded model, and the settings of sampling."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage

from etude.core.call import Completion, Constraint, Sampling, Usage
from etude.core.errors import RequestError
from etude.wire.answers import RecordedCompletion
from etude.wire.bodies import plain_messages
from etude.wire.chat import ChatDialect
from etude.wire.dialect import AnswerMemory, ChatBody
from etude.wire.sampling import change_sampling
from tests.support import tool_call

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

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
def test_answers_are_what_the_sdk_says_they_are(completion: Completion, body: ChatBody) -> None:
    recorded = RecordedCompletion("id", "m", completion=completion)
    wire = json.loads(json.dumps(CHAT.reply([recorded], body, {}, created=1)))
    answer = ChatCompletion.model_validate(wire, strict=True)
    [choice] = answer.choices
    assert choice.message.content == completion.message["content"]
    assert choice.finish_reason == completion.finish_reason
    assert answer.usage is not None
    assert answer.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    if body.logprobs and completion.logprobs is not None:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        expected = [max(logprob, -9999.0) for logprob in completion.logprobs]
        assert [token.logprob for token in choice.logprobs.content] == expected
    else:
        assert choice.logprobs is None


@given(completions(), bodies)
def test_a_stream_says_the_same_in_pieces(completion: Completion, body: ChatBody) -> None:
    recorded = RecordedCompletion("id", "m", completion=completion)
    reply, stream = CHAT.reply([recorded], body, {}, created=1), CHAT.stream(body, {}, created=1)
    events = [*stream.finish(0, recorded), *stream.end(reply)]
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
    whole = reply["choices"][0]["logprobs"]
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [piece.model_dump() for piece in streamed] == ([whole] if whole and whole["content"] else [])
    assert (chunks[-1].usage is not None) == body.include_usage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "one form"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs must have one of"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "there is no tool 'add'"),
        ({"constraint": {"kind": "regex", "__main__": []}}, "parameter 'constraint' is not supported"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"tools": [{"name": "add"}]}, "a tool must be"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        CHAT.parse({**ASK, **change})


ADD, SUB = ({"type": "function", "function": {"name": name}} for name in ("add", "sub"))


@pytest.mark.parametrize(
    ("choice", "chosen", "tools"),
    [
        ("auto", "auto", [ADD, SUB]),
        ("none", "none", [ADD, SUB]),
        ("required", "required", [ADD, SUB]),
        (ADD, "function:add", [ADD, SUB]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [ADD]}}, "auto", [ADD]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SUB]}}, "required", [SUB]),
    ],
)
def test_tools_are_chosen_from(choice: Any, chosen: str, tools: list[Any]) -> None:
    body = CHAT.parse({**ASK, "tools": [ADD, SUB], "tool_choice": choice, "parallel_tool_calls": False})
    assert (body.tool_choice, list(body.tools), body.parallel_tool_calls) == (chosen, tools, False)


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
    assert CHAT.parse({**ASK, **form}).sampling.get("constraint") == constraint


def test_every_parameter_of_sampling_is_read() -> None:
    given = {"top_k": -1, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [5], "logit_bias": {"7": -2}}
    given |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.2}
    asked = CHAT.parse(
        {**ASK, **given, "reasoning_effort": "none", "chat_template_kwargs": {"b": 1}, "thread": "t"}
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
        ({"temperature": -0.1}, "temperature: Input should be greater than or equal to 0, found -0.1"),
        ({"temperature": True}, "temperature: Input should be a valid number, found True"),
        ({"temperature": float("nan")}, "temperature: Input should be a finite number"),
        ({"stop": [""]}, r"stop: .*, found \[''\]"),
        ({"stop": 3}, "stop: Input should be a valid string, found 3"),
        ({"top_z": 3}, "'top_z' is not a sampling parameter; allowed: temperature, top_p"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        change_sampling(Sampling(), changes)
