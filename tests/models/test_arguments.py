"""Arguments of tool calls that a syntax writes without their types: the tool's schema says what a text is."""

from __future__ import annotations

import json

import pytest

from etude.models.arguments import python_calls, typed, written_arguments

BOOLEAN, INTEGER, NUMBER, STRING = ({"type": name} for name in ("boolean", "integer", "number", "string"))
NULL, ARRAY, OBJECT = ({"type": name} for name in ("null", "array", "object"))


def tool(**properties):
    definitions = {"Place": OBJECT, "Colour": {"enum": ["red", "1"]}, "a/b": INTEGER}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def read(text, schema):
    """The JSON text of the value, which tells `True` from 1."""
    return json.dumps(typed({"x": text}, "f", [tool(x=schema)])["x"])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("True", BOOLEAN, True),
        (" False\n", BOOLEAN, False),
        ("1", BOOLEAN, "1"),
        ("True", STRING, "True"),
        ("None", NULL, None),
        ("null", {"anyOf": [INTEGER, NULL]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"type": "integer", "nullable": True}, None),
        ("null", STRING, "null"),
        ("7", {"anyOf": [INTEGER, NULL]}, 7),
        ("7.5", INTEGER, "7.5"),
        ("1e-07", NUMBER, 1e-7),
        ("9" * 30, INTEGER, int("9" * 30)),
        ("123", STRING, "123"),
        ("123", {"oneOf": [STRING, INTEGER]}, 123),
        ("  a\n\n b\n", STRING, "  a\n\n b\n"),
        ("[true, null]", ARRAY, [True, None]),
        ("['a', True, None]", ARRAY, ["a", True, None]),
        ('{"a": {"b": null}}', OBJECT, {"a": {"b": None}}),
        ("{'a': False}", OBJECT, {"a": False}),
        ("{}", {"$ref": "#/$defs/Place"}, {}),
        ("3", {"$ref": "#/$defs/a~1b"}, 3),
        ("1", {"$ref": "#/$defs/Colour"}, "1"),
        ("2", {"enum": ["1", "2", None]}, "2"),
        ("None", {"enum": ["1", "2", None]}, None),
        ("True", {"const": True}, True),
        ("1", {"allOf": [{"anyOf": [INTEGER, STRING]}, STRING]}, "1"),
        ("True", {}, True),
        ('"abc"', {}, '"abc"'),
        ("True", True, True),
        ("True", {"anyOf": BOOLEAN, "allOf": BOOLEAN, "oneOf": 5}, True),
        ("[" * 5000, ARRAY, "[" * 5000),
    ],
)
def test_a_text_is_what_the_schema_says(text, schema, value):
    assert read(text, schema) == json.dumps(value)


def test_a_schema_that_is_made_of_itself_ends():
    loop = {"$ref": "#/properties/x"}
    assert typed({"x": "3"}, "f", [tool(x=loop)]) == {"x": 3}


def test_an_argument_that_is_not_declared_is_what_others_may_be():
    free, texts = tool(), tool()
    texts["function"]["parameters"]["additionalProperties"] = STRING
    assert typed({"y": "3"}, "f", [free]) == {"y": 3}
    assert typed({"y": "3"}, "f", [texts]) == {"y": "3"}


QWEN = "\n<function=f>\n<parameter=x>\n{}\n</parameter>\n<parameter=y>\n{}\n</parameter>\n</function>\n"
GLM = "f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>y</arg_key>\n<arg_value>{}</arg_value>\n"


MINIMAX = (
    '\n<invoke name="f">\n<parameter name="x">{}</parameter>\n<parameter name="y">{}</parameter>\n</invoke>\n'
)


@pytest.mark.parametrize("form", [QWEN, GLM, MINIMAX])
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


def test_strings_of_python_calls_are_escaped_or_raw():
    escaped, raw = r"[f(a='it\'s\n', b=[None, 'x']), g()]", "[f(a='it's\nC:\\new', b=True), g(c='')]"
    assert python_calls(escaped, raw_strings=False) == [
        ("f", '{"a": "it\'s\\n", "b": [null, "x"]}'),
        ("g", "{}"),
    ]
    assert [(name, json.loads(text)) for name, text in python_calls(raw, raw_strings=True)] == [
        ("f", {"a": "it's\nC:\\new", "b": True}),
        ("g", {"c": ""}),
    ]
