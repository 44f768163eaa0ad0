"""Model families as they are: the chat templates of TRL's package, and tokenizers built tiny for them.

Run as a module it writes the families of docs/models.md.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.core.call import Call, ChatRequest, Completion
from etude.core.errors import EngineError
from etude.core.message import Message, Tool
from etude.engines.answer import parse_message
from etude.models.family import probed_turn, written_answers, written_turn
from etude.models.rendering import MORE, PROBES, QUESTION, RESULT, TOOL
from etude.models.template import ChatTemplate

TRL_VERSION = "1.16.0"
"""Whose chat templates the table is made from."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"

MISTRAL_V13 = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""As the tokenizers of Mistral's later models write it (Magistral, Devstral)."""


@dataclass(frozen=True)
class Family:
    """Special tokens that a family's tiny tokenizer needs besides those in its template."""

    ends: str
    """The tokens that end a turn, separated by spaces."""
    extra: str = ""
    bos: str = ""
    drifts: str = ""
    """Why its template writes an earlier conversation differently, but for thinking."""


_DEEPSEEK = Family("<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>")

FAMILIES = {
    **dict.fromkeys(("cohere", "cohere2"), Family("<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>")),
    "deepseek_r1_distill": _DEEPSEEK,
    "deepseekv3": replace(
        _DEEPSEEK, drifts="its prompts open a thought, which a call without one leaves out"
    ),
    **dict.fromkeys(("gemma", "gemma3"), Family("<end_of_turn> <eos>", bos="<bos>")),
    **dict.fromkeys(
        ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
        Family("<turn|> <|tool_response> <eos>", "<|image> <image|>", "<bos>"),
    ),
    "glm4moe": Family("<|user|> <|observation|> <|endoftext|>"),
    "gptoss": Family("<|return|> <|call|>", "<|endoftext|> <|constrain|>"),
    **dict.fromkeys(
        ("llama3", "llama3_1", "llama3_2"),
        Family("<|eot_id|> <|eom_id|> <|end_of_text|>", bos="<|begin_of_text|>"),
    ),
    "mistral_v13": Family("</s>", "[THINK] [/THINK] [ARGS]", "<s>"),
    **dict.fromkeys(
        ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"),
        Family("<|im_end|> <|endoftext|>", "<img> </img> <image>"),
    ),
    **dict.fromkeys(("phi3", "phi3_5"), Family("<|end|> <|endoftext|>")),
    "qwen2_5": Family("<|im_end|> <|endoftext|>", "<tool_call> </tool_call>"),
    **dict.fromkeys(
        ("qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
        Family("<|im_end|> <|endoftext|>", "<think> </think> <tool_call> </tool_call>"),
    ),
}
"""By the name of the chat template in TRL's package, Mistral's aside. LFM is left out, and models for images,
diffusion and training."""

SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]{1,40}[|｜]?>|<[a-z_]+\|>|</?[a-z_]{3,30}>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,20}\]|\[gMASK\]"
)
"""Text in a template that looks like a special token."""


def source(name: str) -> str:
    """The text of a chat template."""
    if name == "mistral_v13":
        return MISTRAL_V13
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def words(name: str) -> Any:
    """A tokenizer of single bytes and of the family's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    facts, text = FAMILIES[name], source(name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {*SPECIAL.findall(text), *facts.ends.split(), *facts.extra.split(), *facts.bos.split()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=sorted(special),
        eos_token=facts.ends.split()[0],
        bos_token=facts.bos or None,
        chat_template=text,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def template(name: str) -> ChatTemplate:
    """A family's chat template, with its tiny tokenizer."""
    tokenizer = words(name)
    ends = tokenizer.convert_tokens_to_ids(FAMILIES[name].ends.split())
    return ChatTemplate(tokenizer, frozenset(ends))


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


def written_kinds(template: ChatTemplate) -> list[str]:
    """Return the kinds of probe answers that the template can write."""
    return [answer.kind for answer in written_answers(template.rendering, {})]


def unread_values(template: ChatTemplate) -> list[str]:
    """Return the kinds of values that change when the template writes a tool call and parses it.

    Tries one call and two, with and without a thought before, if the template can write them.
    """
    written = written_kinds(template)
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
    read = parse_message(template, request, template.decode(ids[:-1]), prompt, ids)
    found = [json.loads(call["function"]["arguments"]) for call in read.get("tool_calls") or ()]
    is_same = json.dumps(found, sort_keys=True) == json.dumps([arguments] * calls, sort_keys=True)
    return is_same and read.get("reasoning_content", "") == thought


_ADD: Tool = {
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
    Shape("a tool call and its result", (*_TOOL_TURN, _SAID, _MORE), (_ADD,)),
    Shape("tool calls over several turns", (*_TOOL_TURN, _SAID, *_TOOL_TURN, _SAID, _MORE), (_ADD,)),
    Shape("two tool calls at once", (_ASK, _calls(*_IDS), *map(_result, _IDS), _SAID, _MORE), (_ADD,)),
    Shape("another system message later on", (_SYSTEM, _ASK, _SAID, _AT_LENGTH, _MORE)),
    Shape("thinking before an answer", (_ASK, _THOUGHT, _MORE, _THOUGHT, _ASK)),
    Shape("thinking before a tool call", (_ASK, _THOUGHT_CALL, _TOOL_TURN[-1], _SAID, _MORE), (_ADD,)),
)
"""The conversations that workflows are made of."""


def tools(template: ChatTemplate) -> str:
    """Whether its tool calls are understood."""
    if lacking := missing(template, "call"):
        return f"not understood: {', '.join(lacking)}"
    if unread := unread_values(template):
        return f"understood, but for {', '.join(unread)}"
    if any("call" in kind for kind in written_kinds(template)):
        return "understood"
    return "the template shows no tools to the model"


def thinking(template: ChatTemplate) -> str:
    """Whether its thinking is separated, and whether it stays in the prompt."""
    if lacking := missing(template, "thinking"):
        return f"not separated: {', '.join(lacking)}"
    if template.rendering.thinking_key is None:
        return "the template knows none"
    kept = "dropped once the user speaks again" if template.drops_thinking() else "kept"
    return f"separated, {kept}"


@dataclass(slots=True)
class Play:
    """A conversation, played call by call. The same fault is in a list once."""

    drift: dict[str, None] = field(default_factory=dict)
    on_purpose: dict[str, None] = field(default_factory=dict)


def play_shape(template: ChatTemplate, shape: Shape) -> Play:
    """Plays the conversation. Raises EngineError where the template refuses it."""
    earlier: list[Call] = []
    play = Play()
    for length in _prompts(shape):
        request = ChatRequest(shape.messages[:length], shape.tools, earlier=tuple(earlier))
        prompt = template.prompt(request)
        if prompt.fault:
            (play.drift if prompt.drifted else play.on_purpose)[prompt.fault] = None
        if length < len(shape.messages):
            answer = shape.messages[length]
            ids = written_ids(template, request, answer)
            sampled = Completion(answer, prompt_ids=prompt.ids, completion_ids=ids)
            earlier.append(Call(len(earlier), "<workflow>", "audited", request, sampled))
    return play


def _prompts(shape: Shape) -> list[int]:
    """How many messages there are before each answer, one that is still to come included."""
    roles = [message["role"] for message in shape.messages]
    answers = [index for index, role in enumerate(roles) if role == "assistant"]
    return answers if roles[-1] == "assistant" else [*answers, len(roles)]


def missing(template: ChatTemplate, part: str) -> list[str]:
    """The kinds of answers with `part`, like `call` or `thinking`, that are written and not understood."""
    reader, answers = template.family().reader, written_answers(template.rendering, {})
    return [each.kind for each in answers if part in each.kind and not each.is_understood_by(reader)]


def row(name: str) -> list[str]:
    """The line of a family in the table."""
    of = template(name)
    reasons: dict[str, None] = {}
    on_purpose = False
    for shape in SHAPES:
        try:
            play = play_shape(of, shape)
        except EngineError:
            continue  # The template refuses such conversations.
        reasons |= play.drift
        on_purpose |= bool(play.on_purpose)
    extends = "yes, but for thinking that is left out" if on_purpose else "yes"
    why = FAMILIES[name].drifts
    assert bool(reasons) == bool(why), f"{name}: drifts because of {list(reasons)}"
    return [f"`{name}`", tools(of), thinking(of), f"{extends}; drifts, because {why}" if why else extends]


def render() -> str:
    """The page, with its table made anew."""
    heads = ["chat template", "tool calls", "thinking", "extends"]
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *map(row, FAMILIES))]
    return PAGE.read_text(encoding="utf-8").partition("| chat template")[0] + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
