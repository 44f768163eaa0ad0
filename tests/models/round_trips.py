"""Values of tool calls' arguments, and which of them a template writes so that they are read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from etude.core.call import ChatRequest
from etude.core.errors import EngineError
from etude.core.message import Message
from etude.models.family import probed_turn, written_turn
from etude.models.probe import MORE, PROBES, QUESTION, RESULT, TOOL
from etude.models.template import ChatTemplate

_STRING = {"type": "string"}
VALUES: Mapping[str, tuple[tuple[Mapping[str, Any], Any], ...]] = {
    "booleans": (({"type": "boolean"}, True), ({"type": ["boolean", "null"]}, False)),
    "null": (
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ({"anyOf": [_STRING, {"type": "null"}]}, None),
    ),
    "numbers": (
        ({"type": "integer"}, -5),
        ({"type": "number"}, 1e-7),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, 2.5),
    ),
    "texts that look like other values": tuple(
        (_STRING, text) for text in ("True", "null", "123", "[1, 2]", '{"a": 1}', "")
    ),
    "choices": (({"enum": ["a", "b"]}, "a"), ({"enum": [1, 2, None]}, 2), ({"const": "1"}, "1")),
    "several lines": ((_STRING, "  if a:\n\n    b\n"),),
    "marks and other scripts": ((_STRING, 'It\'s "a" <b> & \\new\\ {c}, [d]'), (_STRING, "é 中文 😀")),
    "lists": (
        ({"type": "array", "items": {"type": "boolean"}}, [True, False]),
        ({"type": "array"}, [None, 1.5, "True", []]),
    ),
    "objects": (
        ({"$ref": "#/$defs/Place"}, {"city": "Rome", "at": {"x": None, "y": [1, "2"]}, "is_far": True}),
        ({"type": "object"}, {}),
    ),
    "no arguments": (),
}
"""Values of arguments with their JSON schemas, by kind."""


def written_ids(template: ChatTemplate, request: ChatRequest, answer: Message) -> tuple[int, ...]:
    """Return the ids of an answer as the template writes it after a prompt, with its end of turn."""
    rendering, tools, options = template.rendering, request.tools, request.template_options
    turn = written_turn(rendering, request.messages, answer, tools, options)
    spoken = [*request.messages, answer]
    closed = rendering.text(spoken, tools, options, ask=False)
    calls = answer.get("tool_calls")
    following = {**RESULT, "tool_call_id": calls[0].get("id")} if calls else MORE
    longer = rendering.text_or_none([*spoken, following], tools, options) or closed
    end = rendering.end_of_turn(turn[0] if turn else "", closed, longer)
    token = longer[slice(*end)] if end else template._end_of_turn
    return rendering.ids((turn[1] if turn else "") + token)


def unread_values(template: ChatTemplate) -> list[str]:
    """Return the kinds of values that change when the template writes a tool call and parses it.

    Tries one call and two, with and without a thought before, if the template can write them.
    """
    written = template.family().written
    if "a call" not in written:
        return []
    shapes = [("", 1), ("", 2)] if "two calls" in written else [("", 1)]
    asked = template.rendering.text([QUESTION], [TOOL], {}, ask=True)
    turn = probed_turn(template.rendering, PROBES["thinking and a call"], {})
    if "thinking and a call" in written and turn is not None and turn[0] == asked:
        shapes += [("A thought.", calls) for _, calls in shapes]

    def comes_back(kinds: Iterable[str]) -> bool:
        return all(_round_trips(template, kinds, thought, calls) for thought, calls in shapes)

    if comes_back(VALUES) and comes_back(["no arguments"]):
        return []
    return [kind for kind in VALUES if not comes_back([kind])]


def _round_trips(template: ChatTemplate, kinds: Iterable[str], thought: str, calls: int) -> bool:
    """Return whether calls with all values of some kinds parse to the same calls."""
    values = [value for kind in kinds for value in VALUES[kind]]
    arguments = {f"value_{number}": value for number, (_, value) in enumerate(values)}
    # Some templates refuse tools and arguments without a description.
    properties = {
        f"value_{number}": {"description": "A value.", **schema} for number, (schema, _) in enumerate(values)
    }
    place = {"type": "object", "properties": {"city": _STRING, "is_far": {"type": "boolean"}}}
    parameters = {"type": "object", "properties": properties, "required": [], "$defs": {"Place": place}}
    tool = {"name": "probed_values", "description": "A probe.", "parameters": parameters}
    request = ChatRequest((QUESTION,), ({"type": "function", "function": tool},))
    function = {"name": "probed_values", "arguments": json.dumps(arguments)}
    made = [{"id": f"probe{number:04d}", "type": "function", "function": function} for number in range(calls)]
    answer: Message = {"role": "assistant", "content": "", "tool_calls": made}
    if thought:
        answer["reasoning_content"] = thought
    try:
        prompt, ids = template.prompt(request).ids, written_ids(template, request, answer)
    except EngineError:
        return False
    read = template.parse(template.decode(ids[:-1]), request.tools, ids=ids, prompt_ids=prompt)
    found = [json.loads(call["function"]["arguments"]) for call in read.get("tool_calls") or ()]
    is_same = json.dumps(found, sort_keys=True) == json.dumps([arguments] * calls, sort_keys=True)
    return is_same and read.get("reasoning_content", "") == thought
