"""Text as it is sampled: whole characters, and nothing that a stop string may still take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns the tokens of one sequence into pieces of text that add up to the final text."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_ids: frozenset[int],
        stops: Sequence[str],
    ) -> None:
        self._decode = decode
        self._stop_ids = stop_ids
        self._stops = stops
        self._ids: list[int] = []
        self._known = self._read = 0
        """Tokens before `known` are out; those up to `read` are decoded again, as context of the rest."""
        self._held = ""
        self._sent = 0
        self._over = False

    def add(self, token: int) -> str:
        """The text that can be told now that this token was sampled; often empty."""
        if self._over or token in self._stop_ids:
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[self._known : self._read])
        now = self._decode(self._ids[self._known :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return ""
        self._known, self._read = self._read, len(self._ids)
        self._held += now[len(before) :]
        if any(stop in self._held for stop in self._stops):
            self._over = True
            return ""
        return self._let_go(len(self._held) - self._may_be_stop())

    def rest(self, text: str) -> str:
        """What is missing of the final text."""
        return text[self._sent :]

    def _let_go(self, length: int) -> str:
        out, self._held = self._held[:length], self._held[length:]
        self._sent += len(out)
        return out

    def _may_be_stop(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        lengths = [
            size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size])
        ]
        return max(lengths, default=0)
