"""The model's own messages are known again, in whatever form a client sends them back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.message import Message
from etude.wire.answers import RecordedCompletion
from etude.wire.dialect import (
    AnswerMemory,
    ChatBody,
    Dialect,
    arguments_object,
    arguments_text,
)
from etude.wire.messages import MessagesDialect
from etude.wire.responses import ResponsesDialect
from tests.wire.dialects import ASK, completion

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
    wire = dialect.reply([recorded], ChatBody("m", tuple(ASK)), {}, 1)
    assert dialect.parse(request_with(wire)).messages == (*ASK, said, *ASK)


@given(st.text())
def test_arguments_survive_as_an_object_whatever_they_are(text):
    found = arguments_object(text)
    assert isinstance(found, dict)
    assert arguments_object(arguments_text(found)) == found
