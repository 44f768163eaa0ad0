"""Finished conversations to tokens, turn by turn as prompts and completions would be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from etude.core.errors import RequestError
from etude.core.message import Message, Tool
from etude.models.probe import QUESTION, RESULT
from etude.models.rendering import Rendering

Transcript = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids of a finished conversation, and for each whether the assistant would have sampled it."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Of a conversation's text, cut where the assistant's turns begin and end."""

    before: str
    """The end-of-turn token that it follows, or nothing."""
    text: str
    is_sampled: bool = False
    end: str = ""
    """The end-of-turn token that ends a sampled text."""


def transcripts(
    rendering: Rendering, conversations: Sequence[Sequence[Message]], tools: Sequence[Tool]
) -> list[Transcript]:
    """Tokens of finished conversations.

    A message with the `weight` 0 counts as not sampled, as in OpenAI's training files. Raises RequestError
    when the template renders a conversation differently once it has gone on.
    """
    turns = [
        (number, index)
        for number, messages in enumerate(conversations)
        for index, message in enumerate(messages)
        if message.get("role") == "assistant" and message.get("weight") != 0
    ]
    asked = rendering.texts([conversations[number][:index] for number, index in turns], tools, {}, ask=True)
    closed = rendering.texts(
        [conversations[number][: index + 1] for number, index in turns], tools, {}, ask=False
    )
    talks: list[list[_Piece]] = [[] for _ in conversations]
    for (number, index), before, after in zip(turns, asked, closed, strict=True):
        talk = talks[number]
        talk += _turn(rendering, talk, conversations[number], index, tools, before, after)
    texts = list(dict.fromkeys(piece.before + piece.text for talk in talks for piece in talk))
    ids_of = dict(zip(texts, rendering.ids_of(texts), strict=True))
    return [_joined(rendering, talk, ids_of) for talk in talks]


def _turn(
    rendering: Rendering,
    talk: Sequence[_Piece],
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Tool],
    asked: str,
    closed: str,
) -> tuple[_Piece, _Piece]:
    """The text since the last turn of the assistant, and that of the turn, the message `index`.

    `talk` is the conversation until there, `asked` and `closed` the renderings before and after the turn.
    """
    done = "".join(piece.text for piece in talk)
    ends = [end.span() for end in rendering.end_pattern.finditer(closed, len(asked))]
    end, written = (ends[0] if ends else None), closed
    if len(ends) != 1:
        # How it goes on shows what ends a turn: some templates also end the whole conversation.
        usual = RESULT if messages[index].get("tool_calls") else QUESTION
        following = messages[index + 1] if index + 1 < len(messages) else usual
        written = rendering.text_or_none([*messages[: index + 1], following], tools, {}) or closed
        end = rendering.end_of_turn(asked, closed, written)
        if end is None and ends:
            end, written = ends[-1], closed
    if not asked.startswith(done) or not closed.startswith(asked) or end is None:
        raise RequestError(
            f"the chat template cannot extend a conversation at message {index + 1}; train on "
            "single turns instead"
        )
    is_sampled = messages[index].get("weight") != 0
    return (
        _Piece(talk[-1].end if talk else "", asked[len(done) :]),
        _Piece("", written[len(asked) : end[1]], is_sampled, written[slice(*end)]),
    )


def _joined(
    rendering: Rendering, talk: Iterable[_Piece], ids_of: Mapping[str, tuple[int, ...]]
) -> Transcript:
    ids: list[int] = []
    sampled: list[bool] = []
    for piece in talk:
        new = rendering.after(piece.before, piece.text, ids_of[piece.before + piece.text])
        ids += new
        sampled += [piece.is_sampled] * len(new)
    return tuple(ids), tuple(sampled)
