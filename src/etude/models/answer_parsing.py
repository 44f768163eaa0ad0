"""Parsing of sampled tokens into the parts of an answer: thinking, text and tool calls.

Each model family writes them in its own syntax, and each syntax has a reader.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from etude.core.message import Message, Tool
from etude.models.arguments import RAW_STRINGS, json_text, python_calls, written_arguments

_log = logging.getLogger(__name__)

_TAIL = 64
"""Number of tokens at a prompt's end that may contain the start of the answer, like an open `<think>`."""
_PREFILLED = re.compile(r"(?:<think>|\[THINK\])\s*(?:(?:</think>|\[/THINK\])\s*)?\Z")
_MARK = re.compile(r"[<\[{]")
"""The first character of every marker in the known syntaxes; text without one needs no parser."""

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the text of token ids, as `decode_ids` does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of a sampled answer. Calls that cannot be parsed stay in the content, as text."""

    content: str
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """The name of each called tool, and its arguments as JSON text."""

    def message(self, first_call: int) -> Message:
        """Return the answer in OpenAI's format, with calls numbered from `first_call`.

        Call ids are unique in a conversation. They have nine characters, because the templates of Mistral's
        models refuse other lengths.
        """
        message: Message = {"role": "assistant", "content": self.content}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": f"call{index:05d}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(self.calls, first_call)
            ]
        return message


class TemplateReader:
    """Parses answers in a known syntax with a response template of `transformers`."""

    def __init__(self, name: str, decode: Decode, template: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.name = name
        self._decode = decode
        fields = dict(template["fields"])
        self._calls = fields.pop("tool_calls", {})
        self._template = load_response_template(dict(template))
        self._without_calls = load_response_template({**template, "fields": fields})
        self._prefilled = lru_cache(maxsize=1024)(lambda tail: _PREFILLED.search(decode(tail)))

    def read(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Sequence[Tool]) -> Answer:
        """Parse the answer `ids`, which exclude its end of turn. Without tools, it has no calls.

        The whole answer becomes text if the template fails to parse it.
        """
        # The prompt may contain the start of the answer.
        text, begun = self._decode(ids), self._prefilled(tuple(prompt_ids[-_TAIL:]))
        prefix = begun.group() if begun else ""
        if not prefix and not _MARK.search(text):
            return Answer(text)
        answer = None
        if tools:
            answer = self._parse(self._template, text, prefix)
        return answer or self._parse(self._without_calls, text, prefix) or Answer(text)

    def _parse(self, template: Any, text: str, prefix: str) -> Answer | None:
        """Return the parsed answer, or None if a call is broken or the text stops inside one."""
        from transformers.utils.chat_parsing import ResponseParser

        parser = ResponseParser(template, prefix=prefix)
        try:
            parser.feed(text)
            message, last_events = parser.finalize()
            # Half a call could look complete, except in JSON, where no prefix is valid.
            if (
                any(event["field"] == "tool_calls" for event in last_events)
                and self._calls.get("content") != "json"
            ):
                closed = self._template.fields["tool_calls"].close_re
                if closed is None or all(mark.end() != len(text) for mark in closed.finditer(text)):
                    return None
            calls = tuple(self._list_calls(message.get("tool_calls") or ()))
        except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
        thinking = (message.get("reasoning_content") or "").strip()
        content = message.get("content") or ""
        return Answer(content.strip() if thinking or calls else content, thinking, calls)

    def _list_calls(self, parsed: Sequence[Any]) -> Iterator[tuple[str, str]]:
        """Yield names and arguments of calls. Raises ValueError or TypeError if one has no name."""
        for call in parsed:
            if isinstance(call, list):
                yield from self._list_calls(call)
            elif isinstance(call, str):
                yield from python_calls(call, raw_strings=self.name in RAW_STRINGS)
            else:
                function = call.get("function", call) if isinstance(call, dict) else None
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    raise TypeError("a tool call without a name")
                yield function["name"], json_text(function.get("arguments", {}))


class RendererReader:
    """A family of the `renderers` package. It scans token ids, so a typed-out `<tool_call>` is not a call."""

    def __init__(self, name: str, tokenizer: Any, options: Mapping[str, Any]) -> None:
        """Raises any exception of the package if the tokenizer does not belong to the family."""
        from renderers import config_from_name, create_renderer

        self.name = name
        self._tokenizer = tokenizer
        self._renderer = create_renderer(tokenizer, config_from_name(name), chat_template_kwargs=options)

    def read(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Sequence[Tool]) -> Answer:
        """Parse as `TemplateReader.read` does; the whole answer becomes text if the package fails."""
        # The package's parser may raise any exception on a model's output.
        with _without_failing("read an answer"):
            return self._parse(prompt_ids, ids, tools)
        return Answer(decode_ids(self._tokenizer, ids))

    def _parse(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Sequence[Tool]) -> Answer:
        parsed = self._renderer.parse_response(
            list(ids), tools=list(tools) or None, prompt_ids=list(prompt_ids)
        )
        thinking = (parsed.reasoning_content or "").strip()
        if not tools:
            return Answer(self._unread(parsed, prompt_ids, ids), thinking)
        calls = _read_attempts(parsed.tool_calls, tools)
        if calls is None:
            return Answer(self._unread(parsed, prompt_ids, ids), thinking)
        return Answer(parsed.content.strip(), thinking, calls)

    def _unread(self, parsed: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        """Return the content of an answer, including the raw text from its first call on."""
        starts = [call.token_span[0] for call in parsed.tool_calls if call.token_span]
        if not starts:
            return "\n".join(
                filter(None, [parsed.content.strip(), *(call.raw for call in parsed.tool_calls)])
            )
        before = self._renderer.parse_response(list(ids[: min(starts)]), prompt_ids=list(prompt_ids))
        rest = decode_ids(self._tokenizer, ids[min(starts) :])
        return "\n".join(filter(None, [before.content.strip(), rest]))

    def write(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Render a prompt as text."""
        ids = self._renderer.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=True)
        return decode_ids(self._tokenizer, ids)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> tuple[int, ...] | None:
        """Return the prompt that extends the tokens with messages, or None if the family starts anew."""
        rendered = None
        # The package may raise any exception on an agent's messages.
        with _without_failing("extend a prompt"):
            rendered = self._renderer.bridge_to_next_turn(
                list(prompt_ids), list(completion_ids), list(messages), tools=list(tools) or None
            )
        return None if rendered is None else tuple(map(int, rendered.token_ids))


Reader: TypeAlias = TemplateReader | RendererReader
"""Reads a model's answers; `name` is the family's or the syntax's."""


def _read_attempts(attempts: Sequence[Any], tools: Sequence[Tool]) -> tuple[tuple[str, str], ...] | None:
    calls = []
    for call in attempts:
        try:
            written = written_arguments(call.raw, call.name, tools)
        except ValueError:
            return None
        # Arguments that are invalid as JSON may still be valid in the syntax, such as Python's `True`.
        # A call of an unknown tool is the agent's to answer.
        is_whole = call.status in ("ok", "unknown_tool") or (
            call.status == "invalid_json" and written is not None
        )
        if not call.name or not is_whole:
            return None
        calls.append((call.name, json_text(call.arguments if written is None else written)))
    return tuple(calls)


@contextmanager
def _without_failing(task: str) -> Iterator[None]:
    """Log any failure of another package; the caller then does the task without it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        _log.warning("renderers cannot %s, which is done without: %s: %s", task, type(error).__name__, error)


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the exact text of token ids, special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
