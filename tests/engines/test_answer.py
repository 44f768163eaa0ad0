"""Pieces of an answer add up to it, whatever the model's family writes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.call import ChatRequest, Delta, Sampling
from etude.engines.answer import AnswerStream, parse_message
from etude.models.answer_parsing import Answer

ADD = {"type": "function", "function": {"name": "add"}}
STOP = 0


class Letters:
    """A template, and the reader of a family that thinks in tags and calls tools in tags; a token is a
    character."""

    stop_ids = frozenset({STOP})

    def __init__(self) -> None:
        self.rendering = self.reader = self

    def family(self, options: Any) -> Letters:
        return self

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))

    def encode(self, texts: Any) -> list[tuple[int, ...]]:
        return [tuple(map(ord, text)) for text in texts]

    def read(self, prompt_ids: Any, ids: Any, tools: Any) -> Answer:
        text, thinking = self.decode(ids), ""
        if self.decode(prompt_ids).endswith("<think>"):
            text = f"<think>{text}"
        if match := re.match(r"<think>(.*?)</think>\s*", text, re.DOTALL):
            thinking, text = match.group(1).strip(), text[match.end() :]
        calls = re.findall(r"<tool_call>\{.*?\}</tool_call>", text) if tools else []
        if calls:
            text = re.sub(r"<tool_call>.*?</tool_call>", "", text).strip()
        return Answer(text, thinking, tuple((call, "") for call in calls))


def stream_pieces(text: str, request: ChatRequest, prompt: str = "") -> tuple[list[Delta], dict[str, Any]]:
    """The deltas of an answer sampled character by character, and its message."""
    heard: list[Delta] = []
    ids = tuple(map(ord, prompt))
    asked = ChatRequest(
        request.messages, request.tools, request.sampling, prompt=request.prompt, on_delta=heard.append
    )
    template: Any = Letters()
    stream = AnswerStream(template, asked, ids)
    for token in [*map(ord, text), STOP]:
        stream.add(Delta(ids=(token,), logprobs=(-1.0,)))
    stops = request.sampling.stop
    cut = min([text.index(stop) for stop in stops if stop in text], default=len(text))
    return heard, parse_message(template, asked, text[:cut], ids)


PARTS = ["So ", "3", " ", "\n", "<", "<b>", "[1]", "{", "think", "<think>", "</think>", "é"]
CALL = '<tool_call>{"name": "add"}</tool_call>'


@given(
    st.lists(st.sampled_from([*PARTS, CALL]), max_size=12).map("".join),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "go <think>"]),
    st.sampled_from([(), ("3",), ("o <",)]),
)
def test_what_was_given_out_is_never_taken_back(
    text: str, tools: bool, thinks: bool, prompt: str, stop: tuple[str, ...]
) -> None:
    text = f"<think>Hm. </think>{text}" if thinks and not prompt else text
    request = ChatRequest((), (ADD,) if tools else (), Sampling(stop=stop))
    heard, message = stream_pieces(text, request, prompt)
    assert (message["content"] or "").startswith("".join(delta.content for delta in heard))
    thoughts = "".join(delta.reasoning for delta in heard)
    assert (message.get("reasoning_content") or "").startswith(thoughts)
    assert [token for delta in heard for token in delta.ids] == [*map(ord, text), STOP]


@pytest.mark.parametrize(
    ("text", "tools", "content", "thoughts"),
    [
        ("It is 3.", True, "It is 3.", ""),
        ("It is <b>3</b>.", False, "It is <b>3</b>.", ""),
        ("<b>3</b>", False, "<b>3</b>", ""),
        (f"Let me see. {CALL}", True, "Let me see.", ""),
        (CALL, True, "", ""),
        ('{"name": "add"}', True, "", ""),
        ('{"a": [1]}', False, '{"a": [1]}', ""),
        ("<think>Hm. </think>\n\nIt is 3.", True, "It is 3.", "Hm."),
    ],
)
def test_text_is_given_out_at_once_where_it_cannot_be_a_call(
    text: str, tools: bool, content: str, thoughts: str
) -> None:
    heard, _ = stream_pieces(text, ChatRequest((), (ADD,) if tools else ()))
    assert "".join(delta.content for delta in heard) == content
    assert "".join(delta.reasoning for delta in heard) == thoughts
    first = next((index for index, delta in enumerate(heard) if delta.content), None)
    if not thoughts and content and text[0].isalpha():
        assert first == 0, "within the first step"
