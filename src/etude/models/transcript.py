"""Tokens of finished conversations, turn by turn, as prompts and completions would have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etude.core.errors import RequestError
from etude.core.message import Message, Tool, message_text, tool_arguments
from etude.models.probe import QUESTION, RESULT
from etude.models.rendering import Rendering

_SHOWN_CHARACTERS = 60
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}

Transcript = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids of a finished conversation, and for each whether the assistant would have sampled it."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a conversation's text, which is cut where the assistant's turns start and end."""

    before: str
    """The end-of-turn token just before the text, or nothing."""
    text: str
    is_sampled: bool = False
    end: str = ""
    """The end-of-turn token that ends a sampled text."""


def transcript(rendering: Rendering, messages: Sequence[Message], tools: Sequence[Tool]) -> Transcript:
    """Return the tokens of a finished conversation. Raises errors as `split_turns` does.

    A message with `weight` 0 counts as not sampled, as in OpenAI's training files.
    """
    pieces = split_turns(rendering, messages, tools)
    ids, sampled = list[int](), list[bool]()
    encoded = rendering.encode([piece.before + piece.text for piece in pieces])
    for piece, own in zip(pieces, encoded, strict=True):
        new = rendering.after(piece.before, piece.text, own)
        ids += new
        sampled += [piece.is_sampled] * len(new)
    return tuple(ids), tuple(sampled)


def split_turns(rendering: Rendering, messages: Sequence[Message], tools: Sequence[Tool]) -> list[_Piece]:
    """Cut a conversation into pieces. Raises errors as `ChatTemplate.require_written` does."""
    turns = [
        index
        for index, message in enumerate(messages)
        if message.get("role") == "assistant" and message.get("weight") != 0
    ]
    if 0 in turns:
        raise RequestError(
            "the conversation begins with an answer of the assistant, which needs a prompt; put a message of "
            "the user before it, or give it the weight 0"
        )
    pieces: list[_Piece] = []
    for index in turns:
        asked = rendering.text(messages[:index], tools, {}, ask=True)
        for place, message in enumerate(messages[:index], start=1):
            for call in message.get("tool_calls") or ():
                if (name := call["function"]["name"]) not in asked:
                    raise RequestError(
                        f"message {place}: the model's chat template does not write the call of {name!r}; "
                        "choose a model whose template writes tool calls"
                    )
        pieces += _turn(rendering, pieces, messages, index, tools, asked)
    return pieces


def _turn(
    rendering: Rendering,
    earlier: Sequence[_Piece],
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Tool],
    asked: str,
) -> tuple[_Piece, _Piece]:
    """Return the text since the assistant's last turn, and the text of the turn in message `index`.

    `earlier` has the pieces before it; `asked` is the rendering before the turn.
    """
    closed = rendering.text(messages[: index + 1], tools, {}, ask=False)
    done = "".join(piece.text for piece in earlier)
    ends = [end.span() for end in rendering.end_pattern.finditer(closed, len(asked))]
    end, written = (ends[0] if ends else None), closed
    if len(ends) != 1:
        # A continuation shows which token ends the turn: some templates also end the whole conversation.
        usual = RESULT if messages[index].get("tool_calls") else QUESTION
        following = messages[index + 1] if index + 1 < len(messages) else usual
        written = rendering.text_or_none([*messages[: index + 1], following], tools, {}) or closed
        end = rendering.end_of_turn(asked, closed, written)
        if end is None and ends:
            end, written = ends[-1], closed
    if not closed.startswith(asked):
        raise RequestError(
            f"message {index + 1}: the prompt ends with {asked[-_SHOWN_CHARACTERS:]!r}, after which the "
            "model's chat template does not write this answer; where that begins a thought, give the answer "
            "its reasoning_content, or choose another model"
        )
    if not asked.startswith(done) or end is None:
        raise RequestError(
            f"the chat template cannot extend a conversation at message {index + 1}; train on "
            "single turns instead"
        )
    # The prompt may contain the start of the answer, such as the marker of its thinking.
    before = [end.end() for end in rendering.end_pattern.finditer(asked)]
    begun = before[-1] if before else len(asked)
    _require_whole(messages[index], f"message {index + 1}", written[begun : end[0]], rendering)
    return (
        _Piece(earlier[-1].end if earlier else "", asked[len(done) :]),
        _Piece("", written[len(asked) : end[1]], is_sampled=True, end=written[slice(*end)]),
    )


def _require_whole(message: Message, where: str, written: str, rendering: Rendering) -> None:
    """Raise RequestError if the template does not write all parts of an answer.

    Whitespace is ignored: many templates add some around parts, and strip the content.
    """
    squeezed = _strip_spaces(written)
    said = {
        "content": message_text(message),
        "reasoning_content": message.get("reasoning_content") or "",
        "name": message.get("name") or "",
    }
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    for field, text in said.items():
        if _strip_spaces(text) not in squeezed:
            raise RequestError(
                f"{where}: the model's chat template does not write all of {field}, so that it would not be "
                f"learned: {text[:_SHOWN_CHARACTERS]!r}; leave it out, or put it into the content as the "
                "model is to write it"
            )
    # Templates write arguments as they are, as JSON or Python, or as JSON within JSON.
    once = resolve_escapes(written) if functions else ""
    readings = (squeezed, _strip_spaces(once), _strip_spaces(resolve_escapes(once)))
    for function in functions:
        name, arguments = function["name"], tool_arguments(function)
        same = [each for each in functions if each["name"] == name]
        lacks = (
            text for text in _texts(arguments) if not any(_strip_spaces(text) in each for each in readings)
        )
        lacking = name if squeezed.count(_strip_spaces(name)) < len(same) else next(lacks, None)
        if lacking is not None:
            raise RequestError(
                f"{where}: the model's chat template does not write all of the call of {name!r}, so that it "
                f"would not be learned: {lacking[:_SHOWN_CHARACTERS]!r} is missing; choose a model whose "
                "template writes tool calls, or put the call into the content as the model is to write it"
            )
    texts = [*said.values(), *(str(function["arguments"]) for function in functions)]
    if ends := next(filter(None, map(rendering.end_pattern.search, texts)), None):
        raise RequestError(
            f"{where}: it holds {ends[0]!r}, with which the model ends its turn, so that it would learn to "
            "stop there; take it out"
        )


def _strip_spaces(text: str) -> str:
    return "".join(text.split())


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in arguments: field names and values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _texts([*value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def resolve_escapes(text: str) -> str:
    """Resolve the escapes of JSON or Python in a text."""

    def character(match: re.Match[str]) -> str:
        code, sign = match[1] or match[2], match[3]
        return chr(int(code, 16)) if code else _ESCAPES.get(sign, sign)

    plain = _ESCAPE.sub(character, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
