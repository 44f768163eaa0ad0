"""Prompt lookup: what followed the last earlier occurrence of a row's last tokens, as a draft of what comes.

After Saxena's prompt lookup decoding (2023). Agents quote tools' results, their own code, earlier turns.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST = 7
"""Tokens of a draft at most."""
_NGRAM = 3
"""Tokens that have to be the same for what followed them to be a draft."""


class PromptLookup:
    """Where each three tokens of a row, prompt and answer, were last; kept as the row grows."""

    __slots__ = ("_after", "_drafted", "_known", "_last", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        """How often a drafted token is right where those before it were, as far as is known."""
        self._after: dict[tuple[int, ...], int] = {}
        """The place after the last occurrence of each, but for that at the row's end."""
        self._known = 0
        """Length of the row at the last look."""
        self._last: tuple[int, ...] = ()
        """The tokens that it ended with."""
        self._drafted: list[int] = []

    def outcomes(self, ids: Sequence[int]) -> list[bool]:
        """Whether the tokens of the last draft came true, up to the first that did not; read or not."""
        right: list[bool] = []
        for drafted, came in zip(self._drafted, ids[self._known :], strict=False):
            right.append(drafted == came)
            if drafted != came:
                break
        return right

    def draft(self, ids: Sequence[int]) -> list[int]:
        """The next tokens if the row goes on as it did before; a loop is followed around."""
        known, end = self._known, len(ids)
        if end > known + 1:
            new = ids[max(known - _NGRAM, 0) : end - 1]
            ngrams = zip(*(new[offset:] for offset in range(_NGRAM)), strict=False)
            self._after.update(zip(ngrams, range(max(known, _NGRAM), end), strict=False))
        elif end > known:  # The usual case, which has to cost nothing beside a step of a tiny model.
            self._after[self._last] = known
        self._known, self._last = end, tuple(ids[-_NGRAM:])
        place = self._after.get(self._last)
        if place is None:
            self._drafted = []
            return self._drafted
        drafted = self._drafted = list(ids[place : place + MOST])
        while len(drafted) < MOST:
            drafted.append(drafted[len(drafted) - (end - place)])
        return drafted
