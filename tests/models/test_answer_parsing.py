"""Sampled text to a message, with tool calls as OpenAI's clients know them, and their untyped arguments."""

import json
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest
from etude.engines.answer import parse_message
from etude.models.answer_parsing import (
    SYNTAXES,
    TemplateReader,
    convert_arguments,
    decode_ids,
    written_arguments,
)
from etude.models.template import ChatTemplate
from tests.models.tiny_models import CALCULATOR, tokenizer
from tests.support import draws

TAGGED = '<tool_call>{"name": "calculator", "arguments": {"a": 1}}</tool_call>'


def parse(text, calls_before=0):
    words, made = tokenizer(), {"role": "assistant", "tool_calls": [call("calculator", {})] * calls_before}
    template = ChatTemplate(words, frozenset({words.eos_token_id}))
    return parse_message(template, ChatRequest((made,), (CALCULATOR,)), text, ())


def call(name, arguments, number=0):
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(text=st.text(alphabet="ab :=/]}>|.\n", max_size=12))
@settings(max_examples=draws(15))
def test_text_without_a_mark_is_what_the_parser_makes_of_it(syntax, text):
    words, ids = tokenizer(), tokenizer()(text, add_special_tokens=False)["input_ids"]
    known = TemplateReader(syntax, partial(decode_ids, words), SYNTAXES[syntax])
    for template, tools in ((known._without_calls, ()), (known._template, (CALCULATOR,))):
        assert known.read((), ids, tools) == known._parse(template, decode_ids(words, ids), "")


def test_several_calls_and_text_are_kept_apart_and_calls_are_numbered_through_the_conversation():
    found = parse(f"let me see {TAGGED}\n{TAGGED.replace('1', '2')}", calls_before=3)
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
        "mistral",
        '[THINK]Hm.[/THINK][TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
        ("Hm.", "", [("f", {"a": 1}), ("g", {})]),
    ),
]
"""Texts as models write them, which is not always as their templates do; and the parts: thinking, content
and calls."""


@pytest.mark.parametrize(("syntax", "text", "parts"), FORMS)
def test_the_forms_of_known_syntaxes_are_read(syntax, text, parts):
    reader = TemplateReader(syntax, partial(decode_ids, tokenizer()), SYNTAXES[syntax])
    answer = reader.read((), tokenizer()(text, add_special_tokens=False)["input_ids"], [CALCULATOR])
    calls = [(name, json.loads(arguments)) for name, arguments in answer.calls]
    assert (answer.thinking, answer.content, calls) == parts


def test_etudes_own_models_are_read_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    words = tokenizer()
    family = ChatTemplate(words, frozenset({words.eos_token_id})).family()
    assert (family.reader.name, family.extends) == ("hermes", False)


BOOLEAN, INTEGER, NUMBER, STRING = ({"type": name} for name in ("boolean", "integer", "number", "string"))
NULL, ARRAY, OBJECT = ({"type": name} for name in ("null", "array", "object"))


def tool(**properties):
    parameters = {"type": "object", "properties": properties, "$defs": {"Place": OBJECT}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def read(text, schema):
    """The JSON text of the value, which tells `True` from 1."""
    return json.dumps(convert_arguments({"x": text}, "f", [tool(x=schema)])["x"])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("True", BOOLEAN, True),
        ("True", STRING, "True"),
        ("null", {"anyOf": [INTEGER, NULL]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("null", STRING, "null"),
        ("7.5", INTEGER, "7.5"),
        ("1e-07", NUMBER, 1e-7),
        ("9" * 30, INTEGER, int("9" * 30)),
        ("123", {"oneOf": [STRING, INTEGER]}, 123),
        ("123", {"type": "string", "anyOf": [{"pattern": "1"}, {"format": "date"}]}, "123"),
        ("  a\n\n b\n", STRING, "  a\n\n b\n"),
        ("['a', True, None]", ARRAY, ["a", True, None]),
        ('{"a": {"b": null}}', OBJECT, {"a": {"b": None}}),
        ("None", {"enum": ["1", "2", None]}, None),
        ("{}", {"anyOf": [{"$ref": "#/$defs/Place"}, NULL]}, {}),
        ("True", {}, True),
        ("1, 2", {}, "1, 2"),
        ("True", {"anyOf": BOOLEAN, "oneOf": 5}, True),
        ("[" * 5000, ARRAY, "[" * 5000),
    ],
)
def test_a_text_is_what_the_schema_says(text, schema, value):
    assert read(text, schema) == json.dumps(value)


QWEN = "\n<function=f>\n<parameter=x>\n{}\n</parameter>\n<parameter=y>\n{}\n</parameter>\n</function>\n"
GLM = "f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>y</arg_key>\n<arg_value>{}</arg_value>\n"


@pytest.mark.parametrize("form", [QWEN, GLM])
@pytest.mark.parametrize(
    "text", ["a", "", "\n", "  a\n b ", "</parameter>", "</arg_value> </function>", "<arg_key>", "{}"]
)
def test_tags_hold_texts_as_they_are(form, text):
    raw = form.format("True", text)
    assert written_arguments(raw, "f", [tool(x=BOOLEAN, y=STRING)]) == {"x": True, "y": text}


@pytest.mark.parametrize(
    "raw",
    [
        "<function=f>\n<parameter=x>\n1\n",
        "<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\n2",
        "f\n<arg_key>x</arg_key>\n<arg_value>1",
        "f\n<arg_key>x</arg_key>\n1</arg_value>",
    ],
)
def test_a_call_that_is_not_whole_is_none(raw):
    with pytest.raises(ValueError, match="not whole"):
        written_arguments(raw, "f", [tool()])


def test_json_has_its_types_itself():
    assert written_arguments('{"name": "f", "arguments": {"x": "<parameter=x>"}}', "f", [tool()]) is None


def test_gemmas_values_are_read_whatever_stands_in_their_strings():
    raw = 'call:f{a:None,b:[True,null,-1.5],c:{<|"|>d:e<|"|>:<|"|>None, {"x":[1]}<|"|>,e:abc def},f:{}}'
    assert written_arguments(raw, "f", [tool()]) == {
        "a": None,
        "b": [True, None, -1.5],
        "c": {"d:e": 'None, {"x":[1]}', "e": "abc def"},
        "f": {},
    }
