"""Parsing of sampled tokens into the parts of an answer: thinking, text and tool calls.

Each model family writes them in its own syntax. The `renderers` package has parsers for many families.
`transformers` parses the others with the response templates here
(https://huggingface.co/docs/transformers/chat_response_parsing). Some families write arguments without types,
like `<parameter=on>True</parameter>`; the tool's schema then gives the type.
"""

import ast
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from etude.core.json_text import read_json
from etude.core.message import Message, Tool, tool_call

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
                tool_call(f"call{index:05d}", name, arguments)
                for index, (name, arguments) in enumerate(self.calls, first_call)
            ]
        return message


_THINK = {"open": "<think>", "close": "</think>"}
_JSON_CALLS = {"repeats": True, "content": "json", "transform": {"function": "{content}"}}
_NAMED_JSON = _JSON_CALLS | {"transform": {"function": {"name": "{name}", "arguments": "{content}"}}}


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
}


class TemplateReader:
    """Parses answers in a known syntax with a response template of `transformers`."""

    def __init__(self, name: str, decode: Decode, template: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.name = name
        self._decode = decode
        fields = {name: field for name, field in template["fields"].items() if name != "tool_calls"}
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
        answer = self._parse(self._template, text, prefix) if tools else None
        return answer or self._parse(self._without_calls, text, prefix) or Answer(text)

    def _parse(self, template: Any, text: str, prefix: str) -> Answer | None:
        """Return the parsed answer, or None if a call is broken or the text stops inside one."""
        from transformers.utils.chat_parsing import ResponseParser

        parser = ResponseParser(template, prefix=prefix)
        calls = []
        try:
            parser.feed(text)
            message, _ = parser.finalize()
            for call in message.get("tool_calls") or ():
                function = call["function"]
                if not isinstance(function["name"], str):
                    return None
                calls.append((function["name"], json_text(function.get("arguments", {}))))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        thinking = (message.get("reasoning_content") or "").strip()
        content = message.get("content") or ""
        return Answer(content.strip() if thinking or calls else content, thinking, tuple(calls))


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
        with suppress(ValueError):
            if tools:
                calls = tuple(_read_call(call, tools) for call in parsed.tool_calls)
                return Answer(parsed.content.strip(), thinking, calls)
        # The text from the first call on becomes content, as it was sampled.
        rest = [call.raw for call in parsed.tool_calls]
        if starts := [call.token_span[0] for call in parsed.tool_calls if call.token_span]:
            parsed = self._renderer.parse_response(list(ids[: min(starts)]), prompt_ids=list(prompt_ids))
            rest = [decode_ids(self._tokenizer, ids[min(starts) :])]
        return Answer("\n".join(filter(None, [parsed.content.strip(), *rest])), thinking)

    def write(self, messages: Sequence[Message]) -> str:
        """Render a prompt as text. Raises any exception of the package."""
        return decode_ids(
            self._tokenizer, self._renderer.render_ids(list(messages), add_generation_prompt=True)
        )

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


def _read_call(call: Any, tools: Sequence[Tool]) -> tuple[str, str]:
    """Return a call's name and arguments. Raises ValueError if it is not whole."""
    written = written_arguments(call.raw, call.name, tools)
    # Arguments that are invalid as JSON may still be valid in the syntax, such as Python's `True`.
    # A call of an unknown tool is the agent's to answer.
    known = ("ok", "unknown_tool") if written is None else ("ok", "unknown_tool", "invalid_json")
    if not call.name or call.status not in known:
        raise ValueError("the call is not whole")
    return call.name, json_text(call.arguments if written is None else written)


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


def cached_decoding(tokenizer: Any) -> Decode:
    """Return `decode_ids` of a tokenizer with the last texts kept, which are needed for stop texts,
    comparison with the sampled ids, and parsing."""
    decoded = lru_cache(maxsize=4)(lambda ids: decode_ids(tokenizer, ids))
    return lambda ids: decoded(tuple(ids))


_TAGGED = [
    (re.compile(beginning), re.compile(argument, re.DOTALL))
    for beginning, argument in (
        (  # Qwen 3.5
            r"\s*<function=[^>\n]+>",
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            r"(?=\s*(?:<parameter=|(?:</function>\s*)?\Z))",
        ),
        (  # GLM 4.5
            r"\s*[^\s<>{}\"]+\s*(?=<arg_key>)",
            r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            r"(?=\s*(?:<arg_key>|\Z))",
        ),
    )
]
"""Patterns of a call and of its arguments in tags. An argument ends where another follows, or at the end."""
_TAG = re.compile(r"</?(?:parameter|arg_key|arg_value)\b|<tool_call>")
_NO_TEXT = re.compile(r"[\[{\d-]|(?:true|false|null|True|False|None)\Z")
"""Matches where a value that is not a text begins, in JSON or Python."""
_BARE = re.compile(r"([^\s{}\[\],:][^{}\[\],:]*)(:?)")
"""A key, or a value that is not a string, in Gemma 4's syntax."""
_KINDS: Mapping[type, set[str]] = {
    bool: {"boolean"},
    type(None): {"null"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
}


def written_arguments(raw: str, name: str, tools: Sequence[Tool]) -> dict[str, Any] | None:
    """Parse the arguments of a call in tags, or in Gemma 4's syntax. Return None if they are in neither.

    Raises ValueError if the text is incomplete.
    """
    if raw.startswith("call:"):
        pieces = enumerate(("{" + raw.partition("{")[2]).split('<|"|>'))
        plain = [json.dumps(piece) if at % 2 else _BARE.sub(_quote_key, piece) for at, piece in pieces]
        value = read_json("".join(plain))
        if not isinstance(value, dict):
            raise ValueError("no arguments by name")
        return value
    for beginning, argument in _TAGGED:
        if begin := beginning.match(raw):
            body = raw[begin.end() :]
            if _TAG.search(argument.sub("", body)):
                raise ValueError("an argument is not whole")
            values = {each["key"]: each["value"] for each in argument.finditer(body)}
            return convert_arguments(values, name, tools)
    return None


def _quote_key(match: re.Match[str]) -> str:
    return json.dumps(match[1].strip() if match[2] else _value(match[1], None)) + match[2]


def convert_arguments(arguments: Mapping[str, Any], name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Convert each text among a call's arguments to the type in the tool's schema.

    If no tool has this name, the texts stay texts.
    """
    tool = next((tool["function"] for tool in tools if tool["function"]["name"] == name), None)
    if tool is None:
        return dict(arguments)
    try:
        known = tool.get("parameters", {}).get("properties", {})
        kinds = {key: _kinds(known.get(key)) for key in arguments}
    except (AttributeError, TypeError):  # The schema is malformed.
        return dict(arguments)
    return {
        key: _value(value, kinds[key]) if isinstance(value, str) else value
        for key, value in arguments.items()
    }


def _value(text: str, kinds: set[str] | None) -> Any:
    """Return the value of one of these kinds that the text can stand for, or else the text."""
    plain = text.strip()
    for read in (read_json, ast.literal_eval) if _NO_TEXT.match(plain) else ():
        try:
            value = read(plain)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        is_plain = read is read_json or isinstance(value, list | dict | bool | None)
        if is_plain and (kinds is None or not kinds.isdisjoint(_KINDS[type(value)])):
            return value
    return text


def _kinds(schema: Any) -> set[str] | None:
    """Return the names of the types that a schema allows, or None if it does not say."""
    if not isinstance(schema, Mapping):
        return None
    if choices := [schema["const"]] if "const" in schema else schema.get("enum"):
        return set().union(*(_KINDS.get(type(each), {"string"}) for each in choices))
    if named := schema.get("type"):
        return {named} if isinstance(named, str) else {*named}
    found = [_kinds(branch) for branch in schema.get("anyOf") or schema.get("oneOf") or ()]
    known = [kinds for kinds in found if kinds is not None]
    return set().union(*known) if known and len(known) == len(found) else None


def json_text(arguments: Any) -> str:
    """Return a call's arguments as JSON text, unless they are text already."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
