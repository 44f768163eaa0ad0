"""Sampled text to a message, with tool calls as OpenAI's clients know them."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.models.arguments import SYNTAXES
from etude.models.reply import TemplateReader, decoded
from etude.models.template import ChatTemplate
from tests.models.tiny_models import CALCULATOR, tokenizer

TAGGED = '<tool_call>{"name": "calculator", "arguments": {"a": 1}}</tool_call>'


def parse(text, tools=(CALCULATOR,), first_call=0):
    words = tokenizer()
    return ChatTemplate(words, frozenset({words.eos_token_id})).parse(text, tools, first_call=first_call)


def call(name, arguments, number=0):
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(text=st.text(alphabet="ab :=/]}>|.\n", max_size=12))
def test_text_without_a_mark_is_what_the_parser_makes_of_it(syntax, text):
    words, ids = tokenizer(), tokenizer()(text, add_special_tokens=False)["input_ids"]
    decode = partial(decoded, words)
    known = TemplateReader(syntax, decode, SYNTAXES[syntax])
    for template, tools in ((known._without_calls, ()), (known._template, (CALCULATOR,))):
        assert known.read((), ids, tools) == known._parsed(template, decoded(words, ids), "", tools)


def test_several_calls_and_text_are_kept_apart_and_calls_are_numbered_through_the_conversation():
    found = parse(f"let me see {TAGGED}\n{TAGGED.replace('1', '2')}", first_call=3)
    assert found["content"] == "let me see"
    assert found["tool_calls"] == [call("calculator", {"a": 1}, 3), call("calculator", {"a": 2}, 4)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "calculator", "arguments": {}',
        "<tool_call>[1]</tool_call>",
        f"{TAGGED}<tool_call>broken</tool_call>",
    ],
)
def test_a_malformed_call_stays_in_the_content_where_the_agent_can_see_it(text):
    assert parse(text) == {"role": "assistant", "content": text}


FORMS = [
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}',
        ("Hm.", "", [("f", {"a": 1})]),
    ),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f"
        "<|channel|>commentary json<|message|>{}",
        ("", "I look.", [("f", {})]),
    ),
    (
        "deepseek-v3",
        "<think>Hm.</think>So<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        ("Hm.", "So", [("f", {}), ("g", {"a": 1})]),
    ),
    (
        "lfm-2",
        "<|tool_call_start|>[f(a=[1, 'x'], b=null), g()]<|tool_call_end|>Done.",
        ("", "Done.", [("f", {"a": [1, "x"], "b": None}), ("g", {})]),
    ),
    (
        "lfm-2",
        "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        ("", "<|tool_call_start|>[f(1)]<|tool_call_end|>", []),
    ),
    ("lfm-2", "<|tool_call_start|>[" + "(" * 9999 + "]<|tool_call_end|>", None),
    (
        "mistral",
        '[THINK]Hm.[/THINK][TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
        ("Hm.", "", [("f", {"a": 1}), ("g", {})]),
    ),
    (
        "mistral-v3",
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "x"}, {"name": "g", "arguments": {}}]',
        ("", "", [("f", {}), ("g", {})]),
    ),
    (
        "cohere-2",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", '
        '"parameters": {"a": 1}}]<|END_ACTION|>',
        ("Hm.", "", [("f", {"a": 1})]),
    ),
    (
        "muse-glimmer",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n"
        '<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>",
        ("Hm.", "", [("f", {"a": "1"})]),
    ),
]
"""Texts as models write them, which are not always those of their templates; and the parts: thinking, content
and calls."""


@pytest.mark.parametrize(("syntax", "text", "parts"), FORMS)
def test_the_forms_of_known_syntaxes_are_read(syntax, text, parts):
    reader = TemplateReader(syntax, partial(decoded, tokenizer()), SYNTAXES[syntax])
    answer = reader.read((), tokenizer()(text, add_special_tokens=False)["input_ids"], [CALCULATOR])
    calls = [(name, json.loads(arguments)) for name, arguments in answer.calls]
    assert (answer.thinking, answer.content, calls) == (parts or ("", text, []))


def test_etudes_own_models_are_read_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    words = tokenizer()
    family = ChatTemplate(words, frozenset({words.eos_token_id})).family()
    assert (family.reader.name, family.extender) == ("hermes", None)
