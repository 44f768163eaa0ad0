"""Sampled tokens to the parts of an answer: its thinking, its text and its tool calls.

Each family of models writes them in a syntax of its own, and for each there is a reader.
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
from etude.models.arguments import RAW_STRINGS, TAGGED, json_text, python_calls, tagged, written_arguments

_log = logging.getLogger(__name__)

_TAIL = 64
"""Tokens at the end of a prompt that may hold what it wrote of the answer: an open `<think>`, in bytes."""
_PREFILLED = re.compile(r"(?:<think>|\[THINK\])\s*(?:(?:</think>|\[/THINK\])\s*)?\Z")
_MARK = re.compile(r"[<\[{]")
"""With one of these begins every mark of the syntaxes that Etude knows: text without any needs no parser."""

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""The text of token ids, as `decoded` has it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of a sampled answer. Calls that cannot be made out stand in the content, as text."""

    content: str
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """The name of each tool that is called, and its arguments as JSON text."""

    def message(self, first_call: int) -> Message:
        """The answer in OpenAI's format, its calls numbered from `first_call`.

        Ids of calls differ all through a conversation; they have nine characters, because the templates of
        Mistral's models refuse others.
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
    """A response template of a known syntax, as `transformers` reads it."""

    way = "a response template of Etude"

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
        """The parts of the answer that `ids` are, its end of turn left out. Without tools it has no calls.

        All is text where the template raises an error.
        """
        # The prompt may have begun the answer.
        text, begun = self._decode(ids), self._prefilled(tuple(prompt_ids[-_TAIL:]))
        prefix = begun.group() if begun else ""
        if not prefix and not _MARK.search(text):
            return Answer(text)
        answer = None
        if tools:
            answer = self._parsed(self._template, text, prefix, tools)
        return answer or self._parsed(self._without_calls, text, prefix, ()) or Answer(text)

    def _parsed(self, template: Any, text: str, prefix: str, tools: Sequence[Tool]) -> Answer | None:
        """None where a call is broken, or the text stops within one."""
        from transformers.utils.chat_parsing import ResponseParser

        parser = ResponseParser(template, prefix=prefix)
        try:
            parser.feed(text)
            message, last_events = parser.finalize()
            # Half a call could look like a whole one, unless it is JSON, of which no part is JSON.
            if (
                any(event["field"] == "tool_calls" for event in last_events)
                and self._calls.get("content") != "json"
            ):
                closed = self._template.fields["tool_calls"].close_re
                if closed is None or all(mark.end() != len(text) for mark in closed.finditer(text)):
                    return None
            calls = tuple(self._found(message.get("tool_calls") or (), tools))
        except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
        thinking = (message.get("reasoning_content") or "").strip()
        content = message.get("content") or ""
        return Answer(content.strip() if thinking or calls else content, thinking, calls)

    def _found(self, parsed: Sequence[Any], tools: Sequence[Tool]) -> Iterator[tuple[str, str]]:
        """Names and arguments of calls. Raises ValueError or TypeError where one has no name."""
        for call in parsed:
            if isinstance(call, list):
                yield from self._found(call, tools)
            elif isinstance(call, str):
                yield from python_calls(call, raw_strings=self.name in RAW_STRINGS)
            else:
                function = call.get("function", call) if isinstance(call, dict) else None
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    raise TypeError("a tool call without a name")
                arguments = function.get("arguments", {})
                if self.name in TAGGED:
                    arguments = tagged(arguments, self.name, function["name"], tools)
                yield function["name"], json_text(arguments)


class RendererReader:
    """A family of the `renderers` package. It scans token ids: a typed-out `<tool_call>` is no call."""

    way = "renderers"

    fallback: TemplateReader | None = None
    """Reads answers with a call that is broken by its tokens, or stands in a thought."""
    call_ids: frozenset[int] = frozenset()
    """Special tokens of calls: where one is and no call is found, the fallback looks for it, too."""

    def __init__(self, name: str, tokenizer: Any, options: Mapping[str, Any]) -> None:
        """Raises whatever the package raises where the tokenizer is not one of the family."""
        from renderers import config_from_name, create_renderer

        self.name = name
        self._tokenizer = tokenizer
        self._renderer = create_renderer(tokenizer, config_from_name(name), chat_template_kwargs=options)

    def read(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Sequence[Tool]) -> Answer:
        """As `TemplateReader.read`; all is text where the package cannot read it."""
        # Over what a model wrote, another package's parser may raise anything.
        with _without_failing("read an answer"):
            return self._parsed(prompt_ids, ids, tools)
        return Answer(decoded(self._tokenizer, ids))

    def _parsed(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Sequence[Tool]) -> Answer:
        parsed = self._renderer.parse_response(
            list(ids), tools=list(tools) or None, prompt_ids=list(prompt_ids)
        )
        thinking = (parsed.reasoning_content or "").strip()
        if not tools:
            return Answer(self._unread(parsed, prompt_ids, ids), thinking)
        calls = _attempted(parsed.tool_calls, tools)
        # What stands in a thought that is over was only thought of.
        is_over = bool(thinking) and parsed.reasoning_complete
        is_overlooked = calls == () and not is_over and not self.call_ids.isdisjoint(ids)
        if self.fallback is not None and (calls is None or is_overlooked):
            answer = self.fallback.read(prompt_ids, ids, tools)
            if answer.calls:
                return answer
        if calls is None:
            return Answer(self._unread(parsed, prompt_ids, ids), thinking)
        return Answer(parsed.content.strip(), thinking, calls)

    def _unread(self, parsed: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        """The content of an answer whose calls are left in it, with their marks and all that follows."""
        starts = [call.token_span[0] for call in parsed.tool_calls if call.token_span]
        if not starts:
            return "\n".join(
                filter(None, [parsed.content.strip(), *(call.raw for call in parsed.tool_calls)])
            )
        before = self._renderer.parse_response(list(ids[: min(starts)]), prompt_ids=list(prompt_ids))
        rest = decoded(self._tokenizer, ids[min(starts) :])
        return "\n".join(filter(None, [before.content.strip(), rest]))

    def write(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The text of a prompt."""
        ids = self._renderer.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=True)
        return decoded(self._tokenizer, ids)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> tuple[int, ...] | None:
        """The prompt that goes on from tokens with messages; None where the family begins anew there."""
        rendered = None
        # Over what an agent sends, another package may raise anything.
        with _without_failing("extend a prompt"):
            rendered = self._renderer.bridge_to_next_turn(
                list(prompt_ids), list(completion_ids), list(messages), tools=list(tools) or None
            )
        return None if rendered is None else tuple(map(int, rendered.token_ids))


Reader: TypeAlias = TemplateReader | RendererReader
"""Reads what a model writes. Its `name` is that of the family or syntax, its `way` where that comes from."""


def _attempted(attempts: Sequence[Any], tools: Sequence[Tool]) -> tuple[tuple[str, str], ...] | None:
    """Names and arguments of calls as `renderers` parsed them; None where one is broken."""
    calls = []
    for call in attempts:
        try:
            written = written_arguments(call.raw, call.name, tools)
        except ValueError:
            return None
        # What is no JSON there may be a value all the same, such as Python's `True`.
        is_whole = call.status == "ok" or (call.status == "invalid_json" and written is not None)
        if not call.name or not is_whole:
            return None
        calls.append((call.name, json_text(call.arguments if written is None else written)))
    return tuple(calls)


@contextmanager
def _without_failing(task: str) -> Iterator[None]:
    """Log the failure of another package, which may be any; there is another way to do the task."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        _log.warning("renderers cannot %s, which is done without: %s: %s", task, type(error).__name__, error)


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included, exactly as it stands."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
