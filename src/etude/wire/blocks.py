"""Streams of APIs whose answers are made of blocks: thoughts, then text, then calls of tools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, TypeAlias

from etude.core.call import Delta
from etude.wire.answers import Heading, RecordedCompletion, Said
from etude.wire.dialect import ChatBody, Event, Stream

Kind: TypeAlias = Literal["reasoning", "content"]
"""Of a block of text."""


class BlockStream(Stream):
    """Opens and closes blocks; a subclass has the words for it. Such APIs give one answer at a time."""

    def __init__(self, asked: ChatBody) -> None:
        super().__init__(asked)
        self.text = Said()
        self.number = -1
        """Of the block that is open, or was open last."""
        self._open: Kind | None = None
        self._has_begun = False

    @abstractmethod
    def begin(self, heading: Heading) -> Iterator[Event]:
        """The events before the first block."""

    @abstractmethod
    def opened(self, kind: Kind) -> Iterator[Event]:
        """The events at the beginning of the block `number`."""

    @abstractmethod
    def piece(self, kind: Kind, text: str) -> Iterator[Event]:
        """The events of a piece of its text; `text.waiting` has the tokens."""

    @abstractmethod
    def closed(self, kind: Kind, text: str) -> Iterator[Event]:
        """The events at its end, with all of its text."""

    @abstractmethod
    def calls(self, answer: RecordedCompletion) -> Iterator[Event]:
        """The events of the answer's calls of tools."""

    def add(self, index: int, heading: Heading, delta: Delta) -> Iterator[Event]:
        yield from self._begin(heading)
        self.text.take(delta)
        yield from self._pieces(delta)

    def finish(self, index: int, answer: RecordedCompletion) -> Iterator[Event]:
        yield from self._begin(answer)
        rest = self.text.take_rest(answer.completion)
        yield from self._pieces(rest)
        if self.number < 0 and not answer.completion.message.get("tool_calls"):
            yield from self._switch("content")
        yield from self._switch(None)
        yield from self.calls(answer)

    def _begin(self, heading: Heading) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin(heading)

    def _pieces(self, delta: Delta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._switch("reasoning")
            yield from self.piece("reasoning", delta.reasoning)
        if delta.content:
            yield from self._switch("content")
            yield from self.piece("content", delta.content)

    def _switch(self, kind: Kind | None) -> Iterator[Event]:
        if self._open == kind:
            return
        if self._open is not None:
            said = self.text.reasoning if self._open == "reasoning" else self.text.content
            yield from self.closed(self._open, said)
        self._open = kind
        if kind is not None:
            self.number += 1
            yield from self.opened(kind)
