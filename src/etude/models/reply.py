"""Sampled text to an assistant message in OpenAI's format."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from etude.core.errors import ImpossibleCall
from etude.core.message import Message, Tool

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def parse_reply(tokenizer: Any, text: str, tools: Sequence[Tool], prompt: str, first_call: int) -> Message:
    """The message that sampled `text` (without its end-of-turn token) after `prompt` stands for.

    The model's own response template is used where its tokenizer has one; otherwise
    `<tool_call>{"name": …, "arguments": …}</tool_call>`, which most templates write. A tool call that
    does not parse stays in the content, where the agent can see it. Calls are numbered from
    `first_call`, so that their ids differ all through a conversation. Raises EngineError when the
    tokenizer's own parser breaks.
    """
    if getattr(tokenizer, "response_template", None):
        parsed = _by_response_template(tokenizer, text, tools, prompt)
    else:
        parsed = _by_tags(text) if tools else None
    calls = _wire_calls((parsed or {}).get("tool_calls") or (), first_call)
    if parsed is None or calls is None:
        return {"role": "assistant", "content": text}
    message = {"role": "assistant", "content": None, **parsed}
    return {**message, "tool_calls": calls} if calls else {**message, "content": message["content"] or ""}


def _by_response_template(tokenizer: Any, text: str, tools: Sequence[Tool], prompt: str) -> Message | None:
    try:
        parsed = dict(tokenizer.parse_response(text, prefix=prompt, tools=list(tools) or None))
    except (ValueError, KeyError, TypeError):
        return None
    except Exception as error:
        # The parser is the tokenizer's own, and may raise anything.
        raise ImpossibleCall(
            f"the model's answer cannot be parsed: {type(error).__name__}: {error}"
        ) from error
    return {name: value for name, value in parsed.items() if name != "tool_calls" or value}


def _by_tags(text: str) -> Message | None:
    calls = []
    for match in _TOOL_CALL.finditer(text):
        try:
            calls.append(json.loads(match.group(1)))
        except ValueError:
            return None
    return {"content": _TOOL_CALL.sub("", text).strip() or None, "tool_calls": calls} if calls else None


def _wire_calls(calls: Sequence[Any], first: int) -> list[dict[str, Any]] | None:
    """The calls with ids, and with their arguments as JSON text; None when one of them has no name.

    Ids have nine characters, because the templates of Mistral's models refuse others.
    """
    wired = []
    for index, call in enumerate(calls, first):
        function = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        named = {"name": function["name"], "arguments": text}
        wired.append({"id": f"call{index:05d}", "type": "function", "function": named})
    return wired
