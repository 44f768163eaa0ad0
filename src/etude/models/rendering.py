"""Rendering with a chat template: messages to text, and text to token ids."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Any

from etude.core.errors import EngineError, ImpossibleCall, RequestError
from etude.core.message import Message, Tool, is_text, message_text, tool_call, with_parsed_arguments
from etude.models.answer_parsing import cached_decoding

_KEPT_TEXTS = 1024
"""Size of the cache of renderings: all generations of one example start with the same prompt."""
_OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "documents", "raise_exception", "strftime_now"}
)
"""Template variables that a request's own fields set."""
_MARK = 73_019_000_000
"""A number as content, which templates write unchanged, however they transform words."""
_THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")
INLINE = "content"
"""The `thinking_key` of templates with thinking inside the content, in `<think>` tags."""

QUESTION: Message = {"role": "user", "content": "A probed question?"}
NAME, ARGUMENTS = "probed_name", {"count": 1, "text": "probed value"}
LINES = 'probed value\nIt\'s a \\new "line".'
THOUGHT, ANSWER = "A probed thought", "A probed answer."

TOOL: Tool = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "description": "A probed number."},
                "text": {"type": "string", "description": "A probed text."},
            },
            "required": ["count", "text"],
        },
    },
}
"""The tool that the probe answers call."""


def _answer(
    content: str = "", thinking: str = "", calls: int = 0, arguments: Mapping[str, Any] = ARGUMENTS
) -> Message:
    made = [tool_call(f"probe{index:04d}", NAME, json.dumps(arguments)) for index in range(calls)]
    thought = {"reasoning_content": thinking} if thinking else {}
    return {"role": "assistant", "content": content, **thought, **({"tool_calls": made} if calls else {})}


PROBES: Mapping[str, Message] = {
    "text": _answer(ANSWER),
    "a call": _answer(calls=1),
    "thinking": _answer(ANSWER, THOUGHT),
    "thinking and a call": _answer(thinking=THOUGHT, calls=1),
    "text and a call": _answer(ANSWER, calls=1),
    "two calls": _answer(calls=2),
    "several lines of text": _answer(calls=1, arguments={**ARGUMENTS, "text": LINES}),
}
"""Probe answers by content. Arguments are JSON text, as in OpenAI's format."""

MORE: Message = {"role": "user", "content": "And more?"}
RESULT: Message = {"role": "tool", "tool_call_id": "probe0000", "name": NAME, "content": "A probed result."}

_MARKED = "<system>\n{}\n</system>"
"""The form of a later system message inside a user turn."""
_RULE: Message = {"role": "system", "content": "A probed rule."}
_SECOND: Message = {"role": "system", "content": "A second probed rule."}
_ANSWER, _CALL = PROBES["text"], PROBES["a call"]

_TODAY = datetime(2024, 7, 26)
_DATES = "".join(f" | replace('%{code}', '{_TODAY:%{code}}')" for code in "YmdBbAaydjHMSp")
_FIXED_DATE = f"{{%- macro strftime_now(format) -%}}{{{{ format{_DATES} }}}}{{%- endmacro -%}}"
"""Jinja that fixes the date for templates that write today's, as Llama 3.2's does. A run's prompts are then
the same on all days. The date is the one that Llama's templates write without a clock."""

Options = Mapping[str, Any]
"""Template variables besides messages and tools, like `enable_thinking`."""


class Rendering:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        """`tokenizer` comes from `transformers`; `stop_ids` are the tokens that end an assistant's turn.

        Raises RequestError if the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise RequestError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no chat template; choose an "
                "instruction-tuned model, or save this one with a tokenizer that has a template"
            )
        self.tokenizer = tokenizer
        self.end_tokens = {str(tokenizer.convert_ids_to_tokens(token)): token for token in sorted(stop_ids)}
        """The tokens that end a turn, by their texts."""
        self.end_pattern = re.compile("|".join(map(re.escape, self.end_tokens)))
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self.added_pattern = re.compile("|".join(map(re.escape, added)) or "(?!)")
        """Matches the tokens that were added to the vocabulary, like `<|im_end|>`."""
        self._rendered = lru_cache(maxsize=_KEPT_TEXTS)(self._render)
        self.ids = lru_cache(maxsize=_KEPT_TEXTS)(lambda text: self.encode([text])[0])
        self.decode = cached_decoding(tokenizer)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, ask: bool) -> str:
        """Render messages; with `ask`, also the start of an answer after them.

        Raises ImpossibleCall if the template refuses the messages or does not know an option.
        """
        return self._rendered(json.dumps([messages, tools, dict(options)]), ask)

    def text_or_none(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, ask: bool = False
    ) -> str | None:
        """Return a rendering that is only a hint, or None if the template refuses the messages."""
        try:
            return self.text(messages, tools, options, ask=ask)
        except EngineError:
            return None

    def _render(self, conversation: str, ask: bool) -> str:
        from jinja2 import TemplateError

        messages, tools, options = json.loads(conversation)
        options = self.adapt_options(options)
        try:
            if not messages:
                raise ValueError("there is no message")
            fitted = self.fit_roles([*map(self.for_template, messages)])
            text = self._apply(fitted, tools, options, ask=ask)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ImpossibleCall(
                f"the model's chat template refused the messages ({type(error).__name__}: {error}); "
                f"roles: {[message.get('role') for message in messages]}",
                param="messages",
            ) from error
        self._refuse_lost(fitted, text, tools, options)
        return text

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, ask: bool
    ) -> str:
        """Return the template's own rendering. May raise any error of the template."""
        template = self.tokenizer.get_chat_template(tools=list(tools) or None)
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            chat_template=_FIXED_DATE + template if "strftime_now" in template else template,
            add_generation_prompt=ask,
            tokenize=False,
            **options,
        )
        return str(text)

    def _refuse_lost(
        self, messages: Sequence[Message], text: str, tools: Sequence[Tool], options: Options
    ) -> None:
        """Raise ImpossibleCall if the template leaves out a message.

        A template may rephrase a message, and shorten a tool's result once an answer has followed.
        """
        last_answer = max(
            (at for at, each in enumerate(messages) if each.get("role") == "assistant"), default=0
        )
        missing = [
            at for at in _left_out(messages, text) if at > last_answer or messages[at].get("role") != "tool"
        ]
        if not missing:
            return
        marks = {index: str(_MARK + index) for index in missing}
        marked = [
            message | {"content": marks[index]} if index in marks else message
            for index, message in enumerate(messages)
        ]
        written = self._raw(marked, tools, options)
        lost = next((index for index, mark in marks.items() if written and mark not in written), None)
        if lost is not None:
            role, content = messages[lost].get("role"), str(messages[lost]["content"])
            raise ImpossibleCall(
                f"the model's chat template leaves out the message with the role {role!r} that begins with "
                f"{content[:60]!r}; say it in a user message, or choose a model whose "
                "template writes it",
                param="messages",
            )

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of texts, without adding special tokens."""
        if not texts:
            return []
        return [tuple(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def end_of_turn(self, asked: str, closed: str, longer: str) -> tuple[int, int] | None:
        """Return start and end of the token in `longer` that ends the assistant's turn; None if it changed.

        `asked` is the rendering before the turn, `closed` the one after it, and `longer` continues. The token
        is the last one up to which `longer` repeats `closed`, or, as in GLM's templates, the next message's.
        """
        ends = [end.span() for end in self.end_pattern.finditer(closed, len(asked))]
        repeated = [end for end in ends if longer.startswith(closed[: end[1]])]
        following = self.end_pattern.match(longer, len(closed)) if longer.startswith(closed) else None
        return repeated[-1] if repeated else following.span() if following and not ends else None

    def after(self, before: str, text: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the token ids of `text` when it follows `before`, a token that ends turns, or nothing.

        `ids` belong to both together: some tokenizers treat a text differently after another one.
        """
        if not before:
            return ids
        return ids[1:] if ids[:1] == (self.end_tokens[before],) else self.encode([text])[0]

    @cached_property
    def source(self) -> str:
        """The template's text; the one for tools if the tokenizer has several."""
        return str(self.tokenizer.get_chat_template(tools=[TOOL]))

    @cached_property
    def option_names(self) -> frozenset[str]:
        """The template variables that a request's `template_options` may set."""
        from jinja2 import Environment, meta

        environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
        source = re.sub(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}", "", self.source)
        known = meta.find_undeclared_variables(environment.parse(source))
        return frozenset(known) - _OWN_VARIABLES - set(self.tokenizer.special_tokens_map)

    def adapt_options(self, options: Options) -> Options:
        """Adapt the options to the template. Raises ImpossibleCall for options that it does not have.

        Without a `reasoning_effort` option, the effort `none` turns thinking off where possible, and other
        efforts change nothing. Turning thinking off changes nothing in a template without thinking.
        """
        if not options:
            return options
        names, options = self.option_names, dict(options)
        effort = None if "reasoning_effort" in names else options.pop("reasoning_effort", None)
        if effort == "none" and "enable_thinking" in names:
            options.setdefault("enable_thinking", False)
        is_off = options.get("enable_thinking") is False
        if is_off and "enable_thinking" not in names and self.thinking_key is None:
            del options["enable_thinking"]
        if unknown := sorted(options.keys() - names):
            raise ImpossibleCall(
                f"the model's chat template has no option {unknown[0]!r}; leave it out (the options that it "
                f"has: {', '.join(sorted(names)) or 'none'})",
                param="chat_template_kwargs",
            )
        return options

    def for_template(self, message: Message) -> Message:
        """Convert a message for the template: text content, thinking under its own key, arguments as objects.

        Raises ImpossibleCall if the content has other parts than text.
        """
        plain = _plain(message)
        thinking = plain.pop("reasoning_content", None)
        if thinking and self.thinking_key is not None:
            plain |= _thinking_message(self.thinking_key, thinking, plain["content"])
        return _with_objects(plain) if message.get("tool_calls") and not self._writes_arguments else plain

    @cached_property
    def thinking_key(self) -> str | None:
        """The message field from which the template reads thinking, or None if it has no thinking."""
        for key in _THINKING_KEYS:
            for name in ("thinking", "thinking and a call"):
                plain = _plain(PROBES[name])
                thought = _thinking_message(key, plain.pop("reasoning_content"), plain["content"])
                if THOUGHT in (self._render_probe({**plain, **thought}) or ""):
                    return key
        return INLINE if "</think>" in self.source else None

    @cached_property
    def _writes_arguments(self) -> bool:
        """Whether the template writes the arguments of tool calls unchanged, and so needs them as text."""
        answer = _plain(PROBES["a call"])
        text = self._render_probe(_with_objects(answer))
        return text is None or str(answer["tool_calls"][0]["function"]["arguments"]).replace('"', "'") in text

    def _render_probe(self, answer: Message) -> str | None:
        """Return the raw rendering of an answer; if it is refused, with arguments as objects instead."""
        tools = [TOOL] if answer.get("tool_calls") else []
        text = self._raw([QUESTION, answer], tools)
        return self._raw([QUESTION, _with_objects(answer)], tools) if text is None and tools else text

    def _raw(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options = MappingProxyType({})
    ) -> str | None:
        """Return the template's own rendering, or None if it refuses the messages."""
        from jinja2 import TemplateError

        with contextlib.suppress(TemplateError, TypeError, KeyError, ValueError):
            return self._apply(messages, tools, options, ask=False)
        return None

    def fit_roles(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, in the same order, with roles that the template writes; contents are text.

        The role `developer` becomes `system`, and the first system messages become one, or start the user's
        turn if the template cannot write them. Later ones that it cannot write become `<system>` blocks in a
        user turn. Consecutive user turns that it cannot write become one.
        """
        spoken = [message | {"role": "system"} if _is_system(message) else message for message in messages]
        start = next((at for at, message in enumerate(spoken) if not _is_system(message)), len(spoken))
        first, later = spoken[:start], spoken[start:]
        if any(map(_is_system, later)) and not self._takes_later:
            later = [_as_user(_MARKED, message) if _is_system(message) else message for message in later]
        if len(first) > 1:
            first = [_join(first)]
        if first and not self._takes_first:
            first = [_as_user("{}", first[0])]
            if later and later[0]["role"] == "user":
                first, later = [_join([*first, later[0]])], later[1:]
        if self._takes_users:
            return [*first, *later]
        runs = groupby([*first, *later], key=lambda message: message.get("role") == "user")
        return [message for is_user, run in runs for message in ([_join([*run])] if is_user else run)]

    @cached_property
    def _takes_first(self) -> bool:
        """Whether it accepts one system message before the user's."""
        return self._takes([_RULE, QUESTION]) and self._takes([_RULE, QUESTION, _ANSWER, MORE])

    @cached_property
    def _takes_later(self) -> bool:
        """Whether it accepts system messages in mid-conversation and continues as after a user message.

        GLM models end their turns with the user's marker, after which no system message can follow.
        """
        cycle = [QUESTION, _CALL, RESULT]
        return (
            all(
                self._takes([*before, _SECOND, *after])
                for before in ([QUESTION], [QUESTION, _ANSWER], [_RULE, QUESTION, _ANSWER])
                for after in ([], [MORE])
            )
            and (self._takes([*cycle, _SECOND], (TOOL,)) or not self._takes(cycle, (TOOL,)))
            and (self._ends_turn_before(_SECOND) or not self._ends_turn_before(MORE))
        )

    def _ends_turn_before(self, message: Message) -> bool:
        texts = [self._write_raw([QUESTION, _ANSWER, message][:length], ()) for length in (1, 2, 3)]
        asked, closed, longer = (text or "" for text in texts)
        return self.end_of_turn(asked, closed, longer) is not None

    @cached_property
    def _takes_users(self) -> bool:
        """Whether it accepts two consecutive user turns."""
        return self._takes([QUESTION, MORE]) and self._takes([QUESTION, _ANSWER, QUESTION, MORE])

    def _takes(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
        """Return whether all messages are written, in order, and the second rule not as a user message.

        With tools, Llama 3.1 writes any message after the first rule as the user's.
        """
        text = self._write_raw(messages, tools)
        if text is None or _left_out(messages, text):
            return False
        as_user = [_as_user("{}", message) if message is _SECOND else message for message in messages]
        return _SECOND not in messages or self._write_raw(as_user, tools) != text

    def _write_raw(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | None:
        return self._raw([*map(self.for_template, messages)], tools)


def _thinking_message(key: str, thinking: str, content: str) -> Message:
    return {key: f"<think>\n{thinking}\n</think>\n\n{content}" if key == INLINE else thinking}


def _plain(message: Message) -> Message:
    """Convert a message's content to text. Raises ImpossibleCall if it has other parts."""
    if not is_text(message):
        raise ImpossibleCall(
            f"the model takes text only, and a message with the role {message.get('role')!r} has other parts",
            param="messages",
        )
    return {**message, "content": message_text(message)}


def _with_objects(message: Message) -> Message:
    """Convert a message's tool arguments from OpenAI's JSON text to the objects that templates expect."""
    calls = [{**call, "function": with_parsed_arguments(call["function"])} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _is_system(message: Message) -> bool:
    """Return whether a message has the role `system`, or `developer`, which Etude treats alike."""
    return message.get("role") in ("system", "developer")


def _left_out(messages: Sequence[Message], text: str) -> list[int]:
    """Return the indices of non-assistant messages that the text does not contain in this order."""
    missing, end = [], 0
    for index, message in enumerate(messages):
        content = "" if message.get("role") == "assistant" else str(message["content"]).strip()
        start = text.find(content, end)
        if start < 0:
            missing.append(index)
        else:
            end = start + len(content)
    return missing


def _as_user(form: str, message: Message) -> Message:
    return {"role": "user", "content": form.format(message["content"])}


def _join(messages: Sequence[Message]) -> Message:
    return messages[-1] | {"content": "\n\n".join(message["content"] for message in messages)}
