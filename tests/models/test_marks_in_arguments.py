"""The marks of a family's syntax in an argument of a tool call: they are the argument's, and end no call."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest
from etude.inference.answer import AnswerStream, read
from etude.inference.engine import SampledToken
from etude.models.probe import NAME, QUESTION, TOOL
from tests.models.families import template

pytest.importorskip("trl", reason="the families' chat templates come from TRL's package")

MARKS = {
    "qwen2_5": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "qwen3": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "qwen3_instruct_2507": ["<tool_call>", "</tool_call>"],
    "gptoss": ["<|channel|>final<|message|>", "<|end|>", "<|start|>assistant", "<|constrain|>json"],
    "deepseekv3": ["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "\n```"],
    "mistral_v3": ["[TOOL_CALLS]", "[/TOOL_CALLS]", "]"],
    "mistral_v13": ["[TOOL_CALLS]", "[ARGS]", "[/THINK]", "[THINK]"],
    "lfm2_v2": ["<|tool_call_start|>", "<|tool_call_end|>", "'", "]"],
    "muse_glimmer": ["</atem:invoke>", "</atem:function_calls>", "<|eom|>"],
    "qwen3_5_think": ["<tool_call>", "</tool_call>", "</function>", "<think>", "</think>"],
    "qwen3_8": ["<tool_call>", "</tool_call>", "</function>"],
    "nemotron_3_nano": ["<tool_call>", "</tool_call>", "</function>"],
    "glm4moe": ["</tool_call>", "<arg_key>", "<arg_value>"],
    "lfm2_2_5": ["<|tool_call_start|>", "'", "]"],
}
"""By family, without the marks that end an argument: such a mark and that of a call's end do end the call."""


def written(family, request, text, content=""):
    """The ids of an answer that calls a tool with the text."""
    function = {"name": NAME, "arguments": json.dumps({"count": 1, "text": text})}
    call = {"id": "call00000", "type": "function", "function": function}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    if family == "deepseekv3":
        answer["reasoning_content"] = "Hm."  # Its prompts open a thought.
    return template(family).written_ids(request, answer)[:-1]


def read_back(family, text):
    """The arguments of the calls of an answer that calls a tool with the text, and its content."""
    of, request = template(family), ChatRequest((QUESTION,), (TOOL,))
    ids = written(family, request, text)
    message = of.parse(of.decode(ids), [TOOL], ids=ids, prompt_ids=of.prompt(request).ids)
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return calls, message["content"]


@pytest.mark.parametrize(("family", "mark"), [(name, mark) for name in MARKS for mark in MARKS[name]])
def test_a_mark_in_an_argument_is_the_arguments(family, mark):
    for text in (mark, f"a{mark}b", f'say "{mark}"', f"{mark}\n{mark} \\"):
        assert read_back(family, text) == ([{"count": 1, "text": text}], None), text


@pytest.mark.parametrize("family", MARKS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_arguments_come_back_whatever_marks_are_in_them(family, data):
    pieces = [*MARKS[family], *'"\\{}[],:\n é', "a b", "null"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    assert read_back(family, text) == ([{"count": 1, "text": text}], None)


@pytest.mark.parametrize("family", MARKS)
def test_nothing_of_such_a_call_is_given_out_as_text_while_it_is_sampled(family):
    of, deltas = template(family), []
    request = ChatRequest((QUESTION,), (TOOL,), on_delta=deltas.append)
    ids = written(family, request, "".join(MARKS[family]), "" if family == "mistral_v3" else "So.")
    speech = SimpleNamespace(template=of, stop_ids=of._stop_ids)
    prompt = of.prompt(request).ids
    stream = AnswerStream(speech, request, prompt)
    for token in ids:
        stream.add(SampledToken(token, -1.0))
    message = read(speech, request, of.decode(ids), prompt, ids)
    assert len(message["tool_calls"]) == 1
    assert (message["content"] or "").startswith("".join(delta.content for delta in deltas))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_think", "glm4moe"])
def test_a_broken_call_stays_in_the_text_with_its_marks_and_what_follows(family):
    of, text = template(family), "So.\n<tool_call>\nnothing of a call\n</tool_call>\nDone."
    ids = of.rendering.ids_of([text])[0]
    message = of.parse(text, [TOOL], ids=ids, options={"enable_thinking": False})
    assert message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("glm4moe", "<tool_call>f</tool_call>"),
        ("qwen3_5_think", "<tool_call><function=f></function></tool_call>"),
    ],
)
def test_a_whole_call_in_an_argument_is_never_made(family, text):
    calls, content = read_back(family, text)
    assert calls == [{"count": 1, "text": text}] or (not calls and text in content)
