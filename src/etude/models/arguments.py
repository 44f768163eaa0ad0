"""The syntaxes in which models write thinking and tool calls, and parsers for tool-call arguments.

`transformers` parses answers with these response templates where the `renderers` package has no parser
for the family. The format: https://huggingface.co/docs/transformers/chat_response_parsing. Text outside all
other fields is content. Each syntax follows the chat templates of the families in its comment. Some
families write values without types, like `<parameter=on>True</parameter>`; the tool's schema then gives
the type.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etude.core.json_text import read_json
from etude.core.message import Tool

_TAGGED = {
    "qwen-3.5": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    r"(?=\s*(?:<parameter=|(?:</function>\s*)?\Z))",
    "glm-4.5": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
    r"(?=\s*(?:<arg_key>|\Z))",
}
"""Patterns for arguments in tags, by syntax. An argument ends where another follows, or at the end."""
_THINK = {"open": "<think>", "close": "</think>"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_NAMED_JSON = {"repeats": True, "content": "json", "transform": _NAMED}
_JSON_CALLS = _NAMED_JSON | {"transform": {"type": "function", "function": "{content}"}}
_PYTHON_CALLS = {"repeats": True, "open": "<|tool_call_start|>", "close": "<|tool_call_end|>"}
RAW_STRINGS = frozenset({"lfm-2.5"})
"""The syntaxes with Python calls whose strings are not escaped."""


def _syntax(*, content: str = "(?!)", **fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response template. `content` matches markers between pieces of content, which are dropped."""
    piece = {"close_pattern": content, "repeats": True, "join": "", "content_args": {"strip": False}}
    # The reader passes only the prompt's part of the answer, so there is no anchor to find.
    return {"start_anchor_pattern": r"(?!)", "fields": {**fields, "content": piece}}


SYNTAXES: Mapping[str, Mapping[str, Any]] = {
    # Qwen 2.5, Qwen 3 and most others.
    "hermes": _syntax(
        reasoning_content=_THINK, tool_calls=_JSON_CALLS | {"open": "<tool_call>", "close": "</tool_call>"}
    ),
    # [add(a=1, b='two')], parsed as Python.
    "lfm-2": _syntax(reasoning_content=_THINK, tool_calls=_PYTHON_CALLS),
    "lfm-2.5": _syntax(reasoning_content=_THINK, tool_calls=_PYTHON_CALLS),
    "gpt-oss": _syntax(
        content=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>|<\|end\|>",
        reasoning_content={
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            "close": "<|end|>",
            "repeats": True,
            "join": "\n",
        },
        tool_calls=_NAMED_JSON
        | {
            # The template writes the recipient before the channel; models mostly write it after.
            "open_pattern": r"(?:<\|start\|>assistant)?"
            r"(?: to=functions\.(?P<name>[\w.-]+)<\|channel\|>commentary"
            r"|<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]+))"
            r"[^<]*(?:<\|constrain\|>\w+)?<\|message\|>",
            "close_pattern": r"<\|call\|>|\Z",
        },
    ),
    # Mistral's tokenizers from version 11: [TOOL_CALLS]name[ARGS]{…}.
    "mistral": _syntax(
        reasoning_content={"open": "[THINK]", "close": "[/THINK]"},
        tool_calls=_NAMED_JSON
        | {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|\Z",
        },
    ),
    # Mistral's earlier tokenizers: [TOOL_CALLS] and a list of all calls.
    "mistral-v3": _syntax(
        tool_calls={
            "open": "[TOOL_CALLS]",
            "close_pattern": r"\Z",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        }
    ),
}

_PATTERNS = {name: re.compile(pattern, re.DOTALL) for name, pattern in _TAGGED.items()}
_BEGINNINGS = {
    "qwen-3.5": re.compile(r"\s*<function=[^>\n]+>"),
    "glm-4.5": re.compile(r"\s*[^\s<>{}\"]+\s*(?=<arg_key>)"),
}
_TAG = re.compile(r"</?(?:parameter|arg_key|arg_value)\b|<tool_call>")
_QUOTE = '<|"|>'
_BARE = re.compile(r"([^\s{}\[\],:][^{}\[\],:]*)(:?)")
"""A key, or a value that is not a string, in Gemma 4's syntax."""
_RAW_STRING = re.compile(r"(?<==)'(.*?)'(?=,\s*\w+=|\)(?:,\s*[\w.-]+\(|\]\s*\Z))", re.DOTALL)
"""A string argument in LFM 2.5's syntax, up to the next argument, the next call or the end."""
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
"""Constants of JSON and Python."""
_KINDS: Mapping[type, set[str]] = {
    bool: {"boolean"},
    type(None): {"null"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}


def written_arguments(raw: str, name: str, tools: Sequence[Tool]) -> dict[str, Any] | None:
    """Parse the arguments of a call from its text without markers. Return None if they are plain JSON.

    Raises ValueError if the text is incomplete.
    """
    if raw.startswith("call:"):
        value = read_json(_gemma_json(raw.partition("{")[2]))
        if not isinstance(value, dict):
            raise ValueError("no arguments by name")
        return value
    for syntax, pattern in _BEGINNINGS.items():
        if begin := pattern.match(raw):
            return tag_values(raw[begin.end() :], syntax, name, tools)
    return None


def tag_values(body: str, syntax: str, name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Parse the arguments of a call whose syntax has them in tags. Raises ValueError if one is incomplete."""
    pattern = _PATTERNS[syntax]
    if _TAG.search(pattern.sub("", body)):
        raise ValueError("an argument is not whole")
    return convert_arguments({each["key"]: each["value"] for each in pattern.finditer(body)}, name, tools)


def convert_arguments(arguments: Mapping[str, Any], name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Convert each text among a call's arguments to the type in the tool's schema.

    If no tool has this name, the texts stay texts.
    """
    function = next((tool["function"] for tool in tools if tool["function"]["name"] == name), None)
    if function is None:
        return dict(arguments)
    root = _mapping(function.get("parameters"))
    known = _mapping(root.get("properties"))
    others = root.get("additionalProperties", True)
    return {
        key: _value(value, known.get(key, others)) if isinstance(value, str) else value
        for key, value in arguments.items()
    }


def _value(text: str, schema: Any) -> Any:
    """Return the value that the text can stand for and the schema allows, or else the text."""
    kinds = _kinds(schema)
    for value in _readings(text.strip()):
        if kinds is None or not kinds.isdisjoint(_kind(value)):
            return value
    return text


def _readings(text: str) -> Iterator[Any]:
    """Yield the non-string values that a text may stand for."""
    if text in _WORDS:
        yield _WORDS[text]
        return
    if text[:1] not in "[{-0123456789":
        return
    for read in (read_json, ast.literal_eval):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, list | dict) or read is read_json:
            yield value


def _kinds(schema: Any) -> set[str] | None:
    """Return the names of the types that a schema allows, or None if it does not say."""
    if not isinstance(schema, Mapping):
        return None
    choices = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    if choices:
        return set().union(*map(_kind, choices))
    kinds = schema.get("type")
    found = {kinds} if isinstance(kinds, str) else {str(kind) for kind in _list(kinds)}
    for branch in () if found else (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        if (more := _kinds(branch)) is None:
            return None
        found |= more
    return found | {"null"} if found and schema.get("nullable") is True else found or None


def _kind(value: Any) -> set[str]:
    """Return the names that JSON schemas have for a value's type."""
    if isinstance(value, float) and value.is_integer():
        return {"integer", "number"}
    return _KINDS[type(value)]


def _list(value: Any) -> list[Any]:
    """Return the value of a keyword, or an empty list if a malformed schema has another type there."""
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return the value of a keyword, or an empty object if a malformed schema has another type there."""
    return value if isinstance(value, Mapping) else {}


def json_text(arguments: Any) -> str:
    """Return a call's arguments as JSON text, unless they are text already."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def python_calls(text: str, *, raw_strings: bool) -> list[tuple[str, str]]:
    """Parse calls like `[add(a=1, b='two')]`; with `raw_strings`, string contents are not escaped.

    Raises ValueError or SyntaxError for anything else.
    """
    escaped = _RAW_STRING.sub(lambda string: repr(string[1]), text) if raw_strings else text
    tree = ast.parse(escaped.strip(), mode="eval").body
    calls = []
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("not a call with named arguments")
        arguments = {str(option.arg): _literal(option.value) for option in call.keywords}
        calls.append((ast.unparse(call.func), json_text(arguments)))
    return calls


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal that may also contain JSON's constants."""

    class Constants(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.Constant(_WORDS[name.id]) if name.id in _WORDS else name

    return ast.literal_eval(Constants().visit(node))


def _gemma_json(body: str) -> str:
    """Convert `text:<|"|>a<|"|>,count:1}` to JSON; Python's constants are allowed."""

    def bare(match: re.Match[str]) -> str:
        word = match[1].strip()
        return json.dumps(word if match[2] else next(_readings(word), word)) + match[2]

    pieces = enumerate(("{" + body).split(_QUOTE))
    return "".join(json.dumps(piece) if index % 2 else _BARE.sub(bare, piece) for index, piece in pieces)
