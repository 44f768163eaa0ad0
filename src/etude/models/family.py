"""A model's family: how it writes answers, detected from its chat template and not from its name.

The template writes probe answers. The family's reader is the one that reads the same messages back: from
the `renderers` package, or for a known syntax. A family of `renderers` that extends conversations as the
template does also extends prompts.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from etude.core.message import Message, Tool, message_text
from etude.core.sample import shared_length
from etude.models.answer_parsing import SYNTAXES, Reader, RendererReader, TemplateReader
from etude.models.rendering import (
    ANSWER,
    ARGUMENTS,
    INLINE,
    MORE,
    PROBES,
    QUESTION,
    RESULT,
    THOUGHT,
    TOOL,
    Options,
    Rendering,
)

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
    extends: bool
    """Whether the reader's package adds results of tools to a prompt as the template does. Other messages
    need the difference between the template's renderings."""

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> tuple[int, ...] | None:
        """Return the prompt that extends the tokens with messages, or None if the template has to do it."""
        is_able = self.extends and {message["role"] for message in messages} <= {"tool"}
        if not is_able or not isinstance(self.reader, RendererReader):
            return None
        extended = self.reader.extend(prompt_ids, completion_ids, messages, tools)
        before = (*prompt_ids, *completion_ids)
        return extended if extended is not None and extended[: len(before)] == before else None


def find_family(rendering: Rendering, options: Options, name: str | None = None) -> Family:
    """Return the family whose answers the template writes under these options.

    With a `name`, no other family of `renderers` is tried.
    """
    written = tuple(written_answers(rendering, options))
    tokens, readers = rendering.tokenizer.get_added_vocab(), list[tuple[int, TemplateReader]]()
    # The first of equally good readers of text is taken. A template may show tools and not write calls; then
    # the tokens tell which syntax the model writes.
    for key in sorted(
        SYNTAXES, key=lambda key: SYNTAXES[key]["fields"]["tool_calls"].get("open") not in tokens
    ):
        fields = SYNTAXES[key]["fields"]
        if rendering.thinking_key is None:
            # Without a thinking key, tags that only the prompt asked for are part of the text.
            fields = {field: spec for field, spec in fields.items() if field != "reasoning_content"}
        reader = TemplateReader(key, rendering.decode, {**SYNTAXES[key], "fields": fields})
        readers.append((_score(reader, written), reader))
    score, reader = max(readers, key=lambda tried: tried[0])
    if score < len(written) or any(not {*tokens.values()}.isdisjoint(each.ids) for each in written):
        # If the whole syntax is plain text, `renderers` would find no special tokens to parse.
        tried = _renderers(rendering, options, name, written)
        best = max(tried, key=lambda each: each[:3], default=None)
        if best is not None and best[0] >= score:
            return Family(best[3], best[1])
    return Family(reader, False)


def _renderers(
    rendering: Rendering, options: Options, name: str | None, written: Sequence[WrittenAnswer]
) -> Iterator[tuple[int, bool, bool, RendererReader]]:
    """Yield families of `renderers`: how many of the written answers each reads, whether it adds results of
    tools as the template does, and whether it writes a conversation as the template does."""
    from renderers import RendererConfig

    cycles = list(_tool_cycles(rendering, options))
    talk = [QUESTION, PROBES["thinking"], MORE]
    text, plain = rendering.text_or_none(talk, [], options, ask=True), [*map(rendering.for_template, talk)]
    known = [config.model_fields["name"].default for config in get_args(get_args(RendererConfig)[0])]
    for family in [name] if name else [name for name in known if name not in _LEFT_OUT]:
        for default in ({}, {"enable_thinking": False}):
            # A renderer may raise any exception when the tokenizer belongs to another family.
            with suppress(Exception):
                reader = RendererReader(family, rendering.tokenizer, {**default, **options})
                extends, is_alike = _extends(reader, rendering, cycles), reader.write(plain) == text
                yield _score(reader, written), extends, is_alike, reader


def _tool_cycles(rendering: Rendering, options: Options) -> Iterator[list[tuple[int, ...]]]:
    """Yield tokens of a call of a tool: the prompt, the call, and the prompt with the tool's result."""
    for answer in (PROBES["a call"], PROBES["thinking and a call"]):
        asked = rendering.text_or_none([QUESTION], [TOOL], options, ask=True)
        closed = rendering.text_or_none([QUESTION, answer], [TOOL], options)
        longer = rendering.text_or_none([QUESTION, answer, RESULT], [TOOL], options, ask=True)
        if asked is None or closed is None or longer is None or not closed.startswith(asked):
            continue
        end = rendering.end_of_turn(asked, closed, longer)
        written = closed if end is None or end[1] <= len(closed) else longer
        end = end or next((each.span() for each in rendering.end_pattern.finditer(closed, len(asked))), None)
        if end is not None:
            yield rendering.encode([asked, written[len(asked) : end[1]], longer])


def _extends(
    reader: RendererReader, rendering: Rendering, cycles: Sequence[Sequence[tuple[int, ...]]]
) -> bool:
    """Return whether a family adds the tool's result as the template does, wherever it adds it."""
    right = []
    for prompt, completion, longer in cycles:
        extended = reader.extend(prompt, completion, [rendering.for_template(RESULT)], [TOOL])
        if extended is not None:
            # The template may still rewrite an empty thought before it; that needs no new branch.
            new = len(extended) - len(prompt) - len(completion)
            right.append(extended[-new:] == longer[-new:])
    return bool(right) and all(right)


def written_answers(rendering: Rendering, options: Options) -> Iterator[WrittenAnswer]:
    """Yield the probe answers that the template can write."""
    shows_thinking = False
    for kind, message in PROBES.items():
        turn, calls = probed_turn(rendering, message, options), message.get("tool_calls") or ()
        # Parts that are left out cannot be read back.
        parts, argument = [message["content"], message.get("reasoning_content", "")], str(ARGUMENTS["text"])
        if turn and all(part in turn[1] for part in parts) and turn[1].count(argument) >= len(calls):
            shows_thinking |= "reasoning_content" in message
            yield WrittenAnswer(kind, message, (TOOL,) if calls else (), *rendering.encode(turn))
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


def _essence(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that must be equal in a probe answer and in the message read from it."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return message_text(message), message.get("reasoning_content"), calls
