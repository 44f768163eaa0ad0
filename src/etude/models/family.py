"""A model's family: how it writes answers, detected from its chat template and not from its name.

The template writes probe answers. The family's reader is the one that reads the same messages back: from
the `renderers` package, or for a known syntax. A family of `renderers` that extends conversations as the
template does also extends prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from etude.core.message import Message, Tool, message_text
from etude.core.sample import shared_length
from etude.models.answer_parsing import Reader, RendererReader, TemplateReader
from etude.models.arguments import SYNTAXES
from etude.models.probe import ANSWER, CONVERSATIONS, PROBES, QUESTION, THOUGHT, TOOL, is_written
from etude.models.rendering import INLINE, Options, Rendering

_LEFT_OUT = {"auto", "default", "custom", "gpt-oss"}
"""Renderers that are not families, and one that downloads its vocabulary when it is created."""
_TAGGED = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """A probe answer as the template writes it."""

    kind: str
    message: Message
    tools: tuple[Tool, ...]
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """The answer's tokens, without the end of turn."""

    def is_understood_by(self, reader: Reader) -> bool:
        """Return whether the reader reads the same message from these tokens."""
        with suppress(ValueError):
            read = _essence(reader.read(self.prompt_ids, self.ids, self.tools).message(0))
            # In gpt-oss, text next to a call can only be written as thinking.
            moved = {**self.message, "content": "", "reasoning_content": message_text(self.message)}
            return read == _essence(self.message) or (bool(self.tools) and read == _essence(moved))
        return False


@dataclass(frozen=True, slots=True)
class Family:
    """How answers are read and conversations extended."""

    reader: Reader
    extender: RendererReader | None
    extends_after: frozenset[str]
    """The roles of new messages that `extender` adds as the template does. Other roles, and models
    without an extender, use the difference between the template's renderings."""
    written: tuple[str, ...]
    """The kinds of probe answers that the template can write."""

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> tuple[int, ...] | None:
        """Return the prompt that extends the tokens with messages, or None if the template has to do it."""
        if self.extender is None or not {message["role"] for message in messages} <= self.extends_after:
            return None
        extended = self.extender.extend(prompt_ids, completion_ids, messages, tools)
        before = (*prompt_ids, *completion_ids)
        return extended if extended is not None and extended[: len(before)] == before else None


def find_family(rendering: Rendering, options: Options, names: Sequence[str] = ()) -> Family:
    """Return the family whose answers the template writes under these options.

    If `names` has families of `renderers`, only those are tried.
    """
    written = tuple(written_answers(rendering, options))
    reader: Reader = max(_text_readers(rendering), key=lambda each: _score(each, written))
    extender, roles = None, frozenset[str]()
    added = set(rendering.tokenizer.get_added_vocab().values())
    if _score(reader, written) < len(written) or any(added.intersection(each.ids) for each in written):
        # If the whole syntax is plain text, `renderers` would find no special tokens to parse.
        tried = list(_renderers(rendering, options, names, written))
        best = max(tried, key=lambda each: (each.score, each.alike, len(each.extends_after)), default=None)
        if best is not None and best.score >= _score(reader, written):
            reader = best.reader
        best = max(tried, key=lambda each: (len(each.extends_after), each.alike, each.score), default=None)
        if best is not None and best.extends_after:
            extender, roles = best.reader, best.extends_after
    return Family(reader, extender, roles, tuple(dict.fromkeys(answer.kind for answer in written)))


@dataclass(frozen=True, slots=True)
class _Tried:
    reader: RendererReader
    score: int
    """The number of written answers that it reads correctly."""
    alike: int
    """The number of conversations that it writes as the template does."""
    extends_after: frozenset[str]


def _renderers(
    rendering: Rendering, options: Options, names: Sequence[str], written: Sequence[WrittenAnswer]
) -> Iterator[_Tried]:
    from renderers import RendererConfig

    conversations = list(_conversations(rendering, options))
    known = [config.model_fields["name"].default for config in get_args(get_args(RendererConfig)[0])]
    for family in names or [name for name in known if name not in _LEFT_OUT]:
        for default in ({}, {"enable_thinking": False}):
            # A renderer may raise any exception when the tokenizer belongs to another family.
            with suppress(Exception):
                reader = RendererReader(family, rendering.tokenizer, {**default, **options})
                alike, roles = _compare(reader, conversations)
                yield _Tried(reader, _score(reader, written), alike, roles)


def _text_readers(rendering: Rendering) -> Iterator[TemplateReader]:
    """Yield the readers of text, most trusted first: among equally good ones, the first wins."""
    tokens = set(rendering.tokenizer.get_added_vocab())
    # A template may show tools and not write calls; then the tokens tell which syntax the model writes.
    for name in sorted(
        SYNTAXES, key=lambda name: SYNTAXES[name]["fields"]["tool_calls"].get("open") not in tokens
    ):
        fields = SYNTAXES[name]["fields"]
        if rendering.thinking_key is None:
            # Without a thinking key, tags that only the prompt asked for are part of the text.
            fields = {field: spec for field, spec in fields.items() if field != "reasoning_content"}
        yield TemplateReader(name, rendering.decode, {**SYNTAXES[name], "fields": fields})


def written_answers(rendering: Rendering, options: Options) -> Iterator[WrittenAnswer]:
    """Yield the probe answers that the template can write."""
    shows_thinking = False
    for kind, message in PROBES.items():
        turn = probed_turn(rendering, message, options)
        if turn is not None and is_written(message, turn[1]):
            shows_thinking |= "reasoning_content" in message
            tools = (TOOL,) if message.get("tool_calls") else ()
            yield WrittenAnswer(kind, message, tools, *rendering.encode(turn))
    asked = rendering.text([QUESTION], (), options, ask=True)
    if rendering.thinking_key is None:
        yield WrittenAnswer(
            "text", {"role": "assistant", "content": _TAGGED}, (), *rendering.encode([asked, _TAGGED])
        )
    elif not shows_thinking and rendering.thinking_key == INLINE:
        # A template that drops thinking at once does not show its syntax; its prompt may open the thought.
        text = _TAGGED.removeprefix("<think>\n") if asked.rstrip().endswith("<think>") else _TAGGED
        yield WrittenAnswer("thinking", PROBES["thinking"], (), *rendering.encode([asked, text]))


def probed_turn(rendering: Rendering, answer: Message, options: Options) -> tuple[str, str] | None:
    """Return a question's prompt and the text of the template's answer, as `written_turn` does."""
    tools = [TOOL] if answer.get("tool_calls") else []
    return written_turn(rendering, [QUESTION], answer, tools, options)


def written_turn(
    rendering: Rendering,
    messages: Sequence[Message],
    answer: Message,
    tools: Sequence[Tool],
    options: Options,
) -> tuple[str, str] | None:
    """Return the prompt of messages and the template's text for the answer, without the end of the turn.

    Returns None if the template refuses the answer. A part of the prompt that the answer's rendering leaves
    out, like an open `<think>`, is not in the returned prompt.
    """
    asked = rendering.text_or_none(messages, tools, options, ask=True)
    closed = rendering.text_or_none([*messages, answer], tools, options)
    if asked is None or closed is None:
        return None
    start = shared_length(asked, closed)
    if start < len(asked):
        tokens = rendering.added_pattern.finditer(closed)
        start = next((token.start() for token in tokens if token.start() < start < token.end()), start)
    end = rendering.end_pattern.search(closed, start)
    return closed[:start], closed[start : end.start() if end else len(closed)]


def _score(reader: Reader, written: Sequence[WrittenAnswer]) -> int:
    return sum(answer.is_understood_by(reader) for answer in written)


_Conversation: TypeAlias = tuple[list[Message], list[Tool], str, "list[tuple[int, ...]] | None"]
"""Messages, tools, the template's text, and the tokens of the prompt, of the answer and of all of it, if the
answer's end is found."""


def _conversations(rendering: Rendering, options: Options) -> Iterator[_Conversation]:
    for *before, answer, more in CONVERSATIONS:
        tools = [TOOL] if any(message.get("tool_calls") for message in (*before, answer)) else []
        messages = [*before, answer, more]
        asked = rendering.text_or_none(before, tools, options, ask=True)
        closed = rendering.text_or_none(messages[:-1], tools, options)
        longer = rendering.text_or_none(messages, tools, options, ask=True)
        if asked is None or closed is None or longer is None:
            continue
        end = rendering.end_of_turn(asked, closed, longer)
        written = closed if end is None or end[1] <= len(closed) else longer
        end = end or next(
            (match.span() for match in rendering.end_pattern.finditer(closed, len(asked))), None
        )
        ids = None
        if end is not None and closed.startswith(asked):
            ids = rendering.encode([asked, written[len(asked) : end[1]], longer])
        yield [rendering.for_template(message) for message in messages], tools, longer, ids


def _compare(family: RendererReader, conversations: Sequence[_Conversation]) -> tuple[int, frozenset[str]]:
    """Compare a family with the template on the probe conversations. Return how many it writes alike, and the
    roles after which it extends conversations, or starts anew, as the template does."""
    alike = 0
    agreed: set[str] = set()
    failed: set[str] = set()
    for messages, tools, text, ids in conversations:
        alike += family.write(messages, tools) == text
        if ids is None:
            continue
        (prompt, completion, expected), role = ids, messages[-1]["role"]
        extended = family.extend(prompt, completion, messages[-1:], tools)
        if extended is None:
            continue
        new = len(extended) - len(prompt) - len(completion)
        # After tool calls a template may still rewrite an empty thought; that needs no new branch.
        is_right = extended == expected or (role == "tool" and extended[-new:] == expected[-new:])
        (agreed if is_right else failed).add(role)
    return alike, frozenset(agreed - failed)


def _essence(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that must be equal in a probe answer and in the message read from it."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return message_text(message), message.get("reasoning_content"), calls
