"""The chat template: messages to tokens, and sampled text back to a message.

A conversation's tokens are kept and extended. Only what is new is rendered and tokenised, so that
what was sampled stays exactly as it was sampled.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from etude.core.call import Call, ChatRequest
from etude.core.errors import EngineError, RequestError
from etude.core.message import Message, Tool

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and whether they had to be rendered anew."""

    ids: tuple[int, ...]
    drifted: bool


class ChatTemplate:
    """A tokenizer's chat template, both ways."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        """`tokenizer` is a `transformers` tokenizer, `stop_ids` the tokens that end an assistant's turn.

        Raises RequestError when the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise RequestError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no chat template; choose an "
                "instruction-tuned model, or set the template in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._end_tokens = [str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(stop_ids)]
        self._rendered = lru_cache(maxsize=4096)(self._render)
        self._tokenised = lru_cache(maxsize=4096)(self._tokenise)

    def prompt(self, request: ChatRequest) -> Prompt:
        """The prompt of a request: an extension of an earlier call's tokens wherever that is possible."""
        for call in reversed(request.earlier):
            if not _continues(request.messages, call):
                continue
            ids = self._extension(request, call)
            if ids is not None:
                return Prompt(ids, drifted=False)
            return Prompt(self._whole(request), drifted=True)
        return Prompt(self._whole(request), drifted=False)

    def transcript(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Token ids of a finished conversation, and for each whether the assistant would have sampled it.

        Built turn by turn, as prompts and completions would be. Raises RequestError when the template
        renders a conversation differently once it has gone on.
        """
        ids: list[int] = []
        sampled: list[bool] = []
        done = ""
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            asked = self._text(messages[:index], tools, ask=True)
            closed = self._text(messages[: index + 1], tools, ask=False)
            end = self._end_of_turn(closed, len(asked))
            if not asked.startswith(done) or not closed.startswith(asked) or end is None:
                raise RequestError(
                    f"the chat template cannot extend a conversation at message {index + 1}; train on "
                    "single turns instead"
                )
            stop = end.position + len(end.token)
            given, spoken = self._tokenised(asked[len(done) :]), self._tokenised(closed[len(asked) : stop])
            ids += [*given, *spoken]
            sampled += [False] * len(given) + [True] * len(spoken)
            done = closed[:stop]
        return tuple(ids), tuple(sampled)

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer that was written and not sampled, its end of turn included."""
        return self._tokenise(text + self._end_tokens[0])

    def parse(self, text: str, tools: Sequence[Tool]) -> Message:
        """The assistant message that sampled text (without its end-of-turn token) stands for.

        The model's own response template is used where its tokenizer has one; otherwise
        `<tool_call>{"name": …, "arguments": …}</tool_call>`, which most templates write. A tool call
        that does not parse stays in the content, where the agent can see it.
        """
        if getattr(self.tokenizer, "response_template", None):
            try:
                parsed = dict(self.tokenizer.parse_response(text, prefix="", tools=list(tools) or None))
            except ValueError:
                return {"role": "assistant", "content": text}
            return _with_wire_tool_calls({"role": "assistant", "content": None} | parsed)
        return _parse_tool_calls(text) if tools else {"role": "assistant", "content": text}

    def _whole(self, request: ChatRequest) -> tuple[int, ...]:
        return self._tokenised(self._text(request.messages, request.tools, ask=True))

    def _extension(self, request: ChatRequest, call: Call) -> tuple[int, ...] | None:
        """The earlier tokens plus those of the new messages; None where the template cannot extend."""
        if (
            call.completion is None
            or call.completion.prompt_ids is None
            or not call.completion.completion_ids
        ):
            return None
        spoken = request.messages[: len(call.request.messages) + 1]
        closed = self._text(spoken, request.tools, ask=False)
        whole = self._text(request.messages, request.tools, ask=True)
        asked = self._text(spoken[:-1], request.tools, ask=True)
        if not whole.startswith(closed) or not closed.startswith(asked):
            return None
        end = self._end_of_turn(closed, len(asked))
        if end is None:
            return None
        sampled = call.completion.completion_ids
        ended = sampled[-1] in self._stop_ids
        tail = whole[end.position + len(end.token) if ended else end.position :]
        return call.completion.prompt_ids + sampled + self._tokenised(tail)

    def _end_of_turn(self, closed: str, start: int) -> _End | None:
        """Where the end-of-turn token of the last message stands in its rendering."""
        found = [
            _End(position, token)
            for token in self._end_tokens
            if (position := closed.rfind(token, start)) >= 0
        ]
        return max(found, key=lambda end: end.position, default=None)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, ask: bool) -> str:
        return self._rendered(json.dumps([messages, tools]), ask)

    def _render(self, conversation: str, ask: bool) -> str:
        from jinja2 import TemplateError

        messages, tools = json.loads(conversation)
        try:
            text = self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=tools or None,
                add_generation_prompt=ask,
                tokenize=False,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise EngineError(
                f"the model's chat template refused the messages ({type(error).__name__}: {error}); "
                f"roles: {[message.get('role') for message in messages]}"
            ) from error
        return str(text)

    def _tokenise(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class _End:
    position: int
    token: str


def _continues(messages: Sequence[Message], call: Call) -> bool:
    """Whether `messages` are those of `call`, then its reply, then something new."""
    count = len(call.request.messages)
    return (
        call.completion is not None
        and len(messages) > count
        and tuple(messages[:count]) == tuple(call.request.messages)
        and _meaning(messages[count]) == _meaning(call.completion.message)
    )


def _meaning(message: Message) -> tuple[Any, ...]:
    calls = message.get("tool_calls") or ()
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return message.get("role"), message.get("content") or "", tuple(functions)


def _for_template(message: Message) -> Message:
    """Templates expect tool arguments as an object, where OpenAI's format has them as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        with contextlib.suppress(json.JSONDecodeError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _parse_tool_calls(text: str) -> Message:
    calls: list[dict[str, Any]] = []
    for match in _TOOL_CALL.finditer(text):
        try:
            call = json.loads(match.group(1))
        except json.JSONDecodeError:
            return {"role": "assistant", "content": text}
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return {"role": "assistant", "content": text}
        calls.append(
            {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        )
    if not calls:
        return {"role": "assistant", "content": text}
    content = _TOOL_CALL.sub("", text).strip() or None
    return _with_wire_tool_calls({"role": "assistant", "content": content, "tool_calls": calls})


def _with_wire_tool_calls(message: Message) -> Message:
    """Number the tool calls and write their arguments as JSON text, as OpenAI does."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for index, call in enumerate(message["tool_calls"]):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        calls.append(
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {
                    "name": function["name"],
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
        )
    return {**message, "tool_calls": calls}
