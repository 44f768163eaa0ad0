"""The syntaxes in which models write thinking and tool calls, as response templates of `transformers`.

They serve where neither the `renderers` package nor the tokenizer itself knows better. The format is
described in https://huggingface.co/docs/transformers/chat_response_parsing. What is in no other field is
content.
Every syntax here was written from the chat templates of the families that are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TAGGED = {
    "qwen-3.5": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    r"(?=\s*(?:<parameter=|(?:</function>\s*)?\Z))",
    "glm-4.5": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
    r"(?=\s*(?:<arg_key>|\Z))",
    "minimax-m2": r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>'
    r"(?=\s*(?:<parameter name=|</invoke>\s*\Z))",
    "muse-glimmer": r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>'
    r"(?=\s*(?:<atem:parameter name=|\Z))",
}
"""Arguments in tags, by the syntax: each ends where another follows, or nothing."""
_THINK = {"open": "<think>", "close": "</think>"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_JSON_CALLS = {
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_PYTHON_CALLS = {"repeats": True, "open": "<|tool_call_start|>", "close": "<|tool_call_end|>"}
RAW_STRINGS = frozenset({"lfm-2.5"})
"""The syntaxes of Python calls in whose strings nothing is escaped."""


def _syntax(*, content: str = "(?!)", **fields: Mapping[str, Any]) -> dict[str, Any]:
    """A response template; `content` is a pattern of marks between pieces of content, which are left out."""
    piece = {"close_pattern": content, "repeats": True, "join": "", "content_args": {"strip": False}}
    # The reader hands over what the prompt wrote of the answer, and no more: there is nothing to search for.
    return {"start_anchor_pattern": r"(?!)", "fields": {**fields, "content": piece}}


def _tagged_calls(begin: str, end: str, *, before_end: str) -> dict[str, Any]:
    """Calls between the patterns `begin` and `end`, whose arguments are in tags.

    A call ends after an argument, or where it has none: the text of an argument may have its end, too.
    """
    return {
        "open_pattern": begin,
        "close_pattern": rf"(?<=(?:{before_end})\s*){end}",
        "repeats": True,
        "content_args": {"strip": False},
        "transform": _NAMED,
    }


SYNTAXES: Mapping[str, Mapping[str, Any]] = {
    # Qwen 2.5, Qwen 3 and most others.
    "hermes": _syntax(
        reasoning_content=_THINK,
        tool_calls=_JSON_CALLS | {"open": "<tool_call>", "close": "</tool_call>"},
    ),
    # [add(a=1, b='two')]: the text is read as Python.
    "lfm-2": _syntax(reasoning_content=_THINK, tool_calls=_PYTHON_CALLS),
    "lfm-2.5": _syntax(reasoning_content=_THINK, tool_calls=_PYTHON_CALLS),
    # <tool_call>, <function=add>, <parameter=a> and so on, each on a line; Nemotron 3 writes so, too.
    "qwen-3.5": _syntax(
        reasoning_content=_THINK,
        tool_calls=_tagged_calls(
            r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            r"</function>\s*</tool_call>",
            before_end=r"</parameter>|<function=[^>\n]+>",
        ),
    ),
    "glm-4.5": _syntax(
        reasoning_content=_THINK,
        tool_calls=_tagged_calls(
            r"<tool_call>\s*(?P<name>[\w.-]+)",
            r"</tool_call>",
            before_end=r"</arg_value>|<tool_call>\s*[\w.-]+",
        ),
    ),
    "gpt-oss": _syntax(
        content=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>|<\|end\|>",
        reasoning_content={
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            "close": "<|end|>",
            "repeats": True,
            "join": "\n",
        },
        tool_calls={
            # The template writes the recipient before the channel, the models mostly after it.
            "open_pattern": r"(?:<\|start\|>assistant)?"
            r"(?: to=functions\.(?P<name>[\w.-]+)<\|channel\|>commentary"
            r"|<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]+))"
            r"[^<]*(?:<\|constrain\|>\w+)?<\|message\|>",
            "close_pattern": r"<\|call\|>|\Z",
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
    ),
    "deepseek-v3": _syntax(
        content=r"<｜tool▁calls▁(?:begin|end)｜>",
        # Its prompts open a thought. A call ends it.
        reasoning_content={"open": "<think>", "close_pattern": r"</think>|(?=<｜tool▁calls▁begin｜>)"},
        tool_calls={
            "open_pattern": r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
            r"|(?P<name>[^\n<]+)<｜tool▁sep｜>)",
            "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>\s*",
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
    ),
    # Mistral's tokenizers from version 11 on: [TOOL_CALLS]name[ARGS]{…}.
    "mistral": _syntax(
        reasoning_content={"open": "[THINK]", "close": "[/THINK]"},
        tool_calls={
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|\Z",
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
    ),
    # Those before: [TOOL_CALLS] and a list of all calls.
    "mistral-v3": _syntax(
        tool_calls={
            "open": "[TOOL_CALLS]",
            "close_pattern": r"\Z",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
    ),
    # Command R7B and Command A.
    "cohere-2": _syntax(
        content=r"<\|(?:START|END)_RESPONSE\|>",
        reasoning_content={"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        tool_calls={
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{tool_name}", "arguments": "{parameters}"},
            },
            "transform_each": True,
        },
    ),
    "muse-glimmer": _syntax(
        content=r"(?:<\|start\|>assistant)?\s*to=[\w.-]+<\|message\|>|</?atem:function_calls>\s*|<\|eom\|>",
        reasoning_content={
            "open_pattern": r"(?:<\|start\|>assistant)?\s*to=self<\|message\|>",
            "close": "<|eom|>",
            "repeats": True,
            "join": "\n",
        },
        tool_calls=_tagged_calls(
            r'<atem:invoke name="(?P<name>[^"]+)">',
            r"</atem:invoke>\s*",
            before_end=r'</atem:parameter>|<atem:invoke name="[^"]+">',
        ),
    ),
}
