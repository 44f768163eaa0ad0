"""The audit of a chat template: how it is read, over which conversations it extends what was sampled, and
whether tool calls come back as they were written: a call with values of each kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.core.call import Call, ChatRequest, Completion
from etude.core.errors import EngineError
from etude.core.message import Message, Tool
from etude.models import probe
from etude.models.family import probed_turn
from etude.models.template import ChatTemplate
from etude.preflight.finding import Findings

TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
_SYSTEM: Message = {"role": "system", "content": "You are brief."}
_AT_LENGTH: Message = {"role": "system", "content": "Now explain at length."}
_ASK: Message = {"role": "user", "content": "What is 1 + 2?"}
_SAID: Message = {"role": "assistant", "content": "It is 3."}
_MORE: Message = {"role": "user", "content": "And twice that?"}
_THOUGHT: Message = {**_SAID, "reasoning_content": "1 + 2 = 3."}


@dataclass(frozen=True, slots=True)
class Shape:
    """A conversation as an agent may have it. Every answer in it is a call of the model."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def _calls(*ids: str) -> Message:
    call = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    calls = [{"id": id, "type": "function", "function": call} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _result(of: str) -> Message:
    return {"role": "tool", "tool_call_id": of, "name": "add", "content": "3"}


_IDS = ("call00000", "call00001")
_TOOL_TURN = (_ASK, _calls(_IDS[0]), _result(_IDS[0]))
_THOUGHT_CALL: Message = {**_calls(_IDS[0]), "reasoning_content": "I add."}

SHAPES = (
    Shape("a single turn", (_SYSTEM, _ASK, _SAID)),
    Shape("several turns", (_SYSTEM, _ASK, _SAID, _MORE, _SAID, _ASK)),
    Shape("several turns without a system message", (_ASK, _SAID, _MORE, _SAID, _ASK)),
    Shape("a tool call and its result", (*_TOOL_TURN, _SAID, _MORE), (TOOL,)),
    Shape("tool calls over several turns", (*_TOOL_TURN, _SAID, *_TOOL_TURN, _SAID, _MORE), (TOOL,)),
    Shape("two tool calls at once", (_ASK, _calls(*_IDS), *map(_result, _IDS), _SAID, _MORE), (TOOL,)),
    Shape("another system message later on", (_SYSTEM, _ASK, _SAID, _AT_LENGTH, _MORE)),
    Shape("thinking before an answer", (_ASK, _THOUGHT, _MORE, _THOUGHT, _ASK)),
    Shape("thinking before a tool call", (_ASK, _THOUGHT_CALL, _TOOL_TURN[-1], _SAID, _MORE), (TOOL,)),
)
"""The conversations that workflows are made of."""


def audit(template: ChatTemplate) -> Findings:
    """How the template is read, and for each shape whether every prompt extends the tokens before it.

    If not, which message is at fault, and how many tokens are computed for the branches that it makes.
    """
    findings = Findings()
    for what, way in ways(template).items():
        (findings.ok if way.is_whole else findings.warn)(what, way.detail)
    for shape in SHAPES:
        try:
            play = played(template, shape)
        except EngineError as error:
            findings.warn(shape.name, f"refused: {error}")
            continue
        if play.drift:
            findings.warn(shape.name, f"starts a new branch: {'; '.join(play.drift)} ({play.cost})")
        elif play.on_purpose:
            findings.ok(shape.name, f"a new branch on purpose: {'; '.join(play.on_purpose)} ({play.cost})")
        else:
            findings.ok(shape.name, "extends" if len(_prompts(shape)) > 1 else "renders")
    return findings


@dataclass(frozen=True, slots=True)
class Way:
    """How a part of what models write is treated."""

    detail: str
    is_whole: bool = True
    """Whether nothing of it is missing."""


def ways(template: ChatTemplate) -> dict[str, Way]:
    """The way of reading answers, of extending conversations, of tool calls, thinking and system messages."""
    family = template.family()
    reading = f"{family.reader.name}, by {family.reader.way}"
    if family.extender is None:
        extending = "the difference of the template's renderings"
    else:
        roles = " and ".join(sorted(family.extends_after))
        extending = f"{family.extender.name}, by renderers (messages of the roles {roles})"
    return {
        "answers are read by": Way(reading),
        "conversations are extended by": Way(extending),
        "tool calls": _tools(template),
        "thinking": _thinking(template),
        "system messages": Way(template.rendering.roles.way),
    }


def _tools(template: ChatTemplate) -> Way:
    family = template.family()
    if missing := family.missing("call"):
        return Way(f"not understood: {', '.join(missing)}", is_whole=False)
    if unread := unread_values(template):
        return Way(f"understood, but for {', '.join(unread)}", is_whole=False)
    if any("call" in kind for kind in family.written):
        return Way("understood")
    plain = template.prompt(ChatRequest((_ASK,))).ids
    if template.prompt(ChatRequest((_ASK,), (TOOL,))).ids == plain:
        return Way("the template shows no tools to the model")
    return Way(f"the template writes none; read as {family.reader.name}")


def _thinking(template: ChatTemplate) -> Way:
    if missing := template.family().missing("thinking"):
        return Way(f"not separated: {', '.join(missing)}", is_whole=False)
    if template.rendering.thinking_key is None:
        return Way("the template knows none")
    kept = "dropped once the user speaks again" if template.drops_thinking else "kept"
    return Way(f"separated, {kept}")


@dataclass(slots=True)
class Play:
    """A conversation, played call by call. The same fault is in a list once."""

    drift: dict[str, None] = field(default_factory=dict)
    on_purpose: dict[str, None] = field(default_factory=dict)
    computed: int = 0
    """Tokens of all branches."""
    last: int = 0
    """Tokens of the last prompt, the longest of all."""

    @property
    def cost(self) -> str:
        """How much more is computed than for one sequence."""
        times = f"{self.computed / self.last:.1f} times those of the conversation"
        return f"{self.computed} tokens in all branches, {times}"


def played(template: ChatTemplate, shape: Shape) -> Play:
    """Plays the conversation. Raises EngineError where the template refuses it."""
    earlier: list[Call] = []
    play = Play()
    for length in _prompts(shape):
        request = ChatRequest(shape.messages[:length], shape.tools, earlier=tuple(earlier))
        prompt = template.prompt(request)
        if prompt.fault is not None:
            (play.on_purpose if prompt.fault.on_purpose else play.drift)[str(prompt.fault)] = None
            play.computed += play.last
        play.last = len(prompt.ids)
        if length < len(shape.messages):
            answer = shape.messages[length]
            ids = template.written_ids(request, answer)
            sampled = Completion(answer, prompt_ids=prompt.ids, completion_ids=ids)
            earlier.append(Call(len(earlier), "<workflow>", "audited", request, sampled))
    play.computed += play.last
    return play


def _prompts(shape: Shape) -> list[int]:
    """How many messages there are before each answer, one that is still to come included."""
    roles = [message["role"] for message in shape.messages]
    answers = [index for index, role in enumerate(roles) if role == "assistant"]
    return answers if roles[-1] == "assistant" else [*answers, len(roles)]


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
"""Values of arguments with their JSON schemas, by what they are called."""
_PLACE = {"type": "object", "properties": {"city": _STRING, "is_far": {"type": "boolean"}}}


def unread_values(template: ChatTemplate) -> list[str]:
    """The kinds of values that do not come back, in a call or in two at once, after a thought or without.

    Only calls are looked at that the template writes at all, and thoughts that may follow its prompt.
    """
    written = template.family().written
    if "a call" not in written:
        return []
    shapes = [("", 1), ("", 2)] if "two calls" in written else [("", 1)]
    asked = template.rendering.text([probe.QUESTION], [probe.TOOL], {}, ask=True)
    turn = probed_turn(template.rendering, probe.PROBES["thinking and a call"], {})
    if "thinking and a call" in written and turn is not None and turn[0] == asked:
        shapes += [("A thought.", calls) for _, calls in shapes]

    def comes_back(kinds: Iterable[str]) -> bool:
        return all(_comes_back(template, kinds, thought, calls) for thought, calls in shapes)

    if comes_back(VALUES) and comes_back(["no arguments"]):
        return []
    return [kind for kind in VALUES if not comes_back([kind])]


def _comes_back(template: ChatTemplate, kinds: Iterable[str], thought: str, calls: int) -> bool:
    """Whether calls with all values of some kinds are read from what the template writes of them."""
    values = [value for kind in kinds for value in VALUES[kind]]
    arguments = {f"value_{number}": value for number, (_, value) in enumerate(values)}
    request = ChatRequest((probe.QUESTION,), (_tool([schema for schema, _ in values]),))
    function = {"name": "probed_values", "arguments": json.dumps(arguments)}
    made = [{"id": f"probe{number:04d}", "type": "function", "function": function} for number in range(calls)]
    answer: Message = {"role": "assistant", "content": "", "tool_calls": made}
    if thought:
        answer["reasoning_content"] = thought
    try:
        prompt, ids = template.prompt(request).ids, template.written_ids(request, answer)
    except EngineError:
        return False
    read = template.parse(template.decode(ids[:-1]), request.tools, ids=ids, prompt_ids=prompt)
    found = [json.loads(call["function"]["arguments"]) for call in read.get("tool_calls") or ()]
    is_same = json.dumps(found, sort_keys=True) == json.dumps([arguments] * calls, sort_keys=True)
    return is_same and read.get("reasoning_content", "") == thought


def _tool(schemas: list[Mapping[str, Any]]) -> Tool:
    """A tool whose arguments have these schemas."""
    # Some templates refuse tools and arguments without a description.
    properties = {
        f"value_{number}": {"description": "A value.", **schema} for number, schema in enumerate(schemas)
    }
    parameters = {"type": "object", "properties": properties, "required": [], "$defs": {"Place": _PLACE}}
    function = {"name": "probed_values", "description": "A probe.", "parameters": parameters}
    return {"type": "function", "function": function}
