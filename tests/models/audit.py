"""How a chat template is read, and over which conversations it extends what was sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.core.call import Call, ChatRequest, Completion
from etude.core.message import Message, Tool
from etude.models.template import ChatTemplate
from etude.preflight.call_values import unread_values

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
