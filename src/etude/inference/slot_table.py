"""The slot table: which row holds which slot, and what earlier rows left in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from etude.inference.row import Row

_FIRST_SLOTS = 8


@dataclass(slots=True)
class _Held:
    """What a slot holds, and for whom."""

    conversation: str = ""
    ids: list[int] = field(default_factory=list)
    """Tokens that a released row left; empty while a row is in the slot."""
    row: Row | None = None
    used: int = 0
    """When it was taken or released last; 0 for never."""


class SlotTable:
    """Slots by number. They are made as they are needed."""

    def __init__(self, kept: int, least: int) -> None:
        """Up to `kept` slots keep what finished rows left; `least` slots are there from the start."""
        self._kept = kept
        self._held = [_Held() for _ in range(max(least, min(kept, _FIRST_SLOTS)))]
        self._clock = 0

    def __len__(self) -> int:
        return len(self._held)

    def place(self, row: Row, *, reuse: bool) -> None:
        """Give the row a slot: that of its own conversation, else one that nobody used, else the oldest.

        With `reuse`, the tokens that it shares with what the slot holds count as read.
        """
        idle = [slot for slot, held in enumerate(self._held) if held.row is None]
        slot, shared = self._best_own(row, idle) if reuse else (-1, 0)
        if slot < 0:
            slot = self._fresh(idle)
        held = self._held[slot]
        held.row, held.conversation, held.ids, held.used = row, row.conversation, [], self._tick()
        row.slot, row.cached = slot, shared

    def release(self, row: Row) -> None:
        """Keep what the row read for its conversation's next turn."""
        if row.slot >= 0:
            held = self._held[row.slot]
            held.row, held.ids, held.used = None, row.ids[: row.cached], self._tick()

    def forget(self) -> None:
        """Nothing that the slots hold is valid any more; rows in them are read again from their start."""
        for held in self._held:
            held.ids = []
            if held.row is not None:
                held.row.cached = 0

    def swap(self, first: int, second: int) -> None:
        """Exchange two slots."""
        held = self._held
        held[first], held[second] = held[second], held[first]
        for slot in (first, second):
            row = held[slot].row
            if row is not None:
                row.slot = slot

    def _best_own(self, row: Row, idle: Sequence[int]) -> tuple[int, int]:
        """The idle slot of the row's conversation with most of its tokens, and how many; -1 for none."""
        best, most = -1, 0
        for slot in idle:
            if self._held[slot].conversation == row.conversation:
                # The last token is always read anew: what comes after it is what is wanted.
                shared = min(_shared(self._held[slot].ids, row.ids), len(row.ids) - 1)
                if shared > most:
                    best, most = slot, shared
        return best, most

    def _fresh(self, idle: Sequence[int]) -> int:
        """A slot without regard to what it holds, made where there is none to spare."""
        oldest = min(idle, key=lambda slot: self._held[slot].used, default=-1)
        if oldest >= 0 and (self._held[oldest].used == 0 or len(self._held) >= self._kept):
            return oldest
        count = len(self._held)
        self._held.extend(
            _Held() for _ in range(max(count, _FIRST_SLOTS) if count < self._kept else count // 2)
        )
        return count

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _shared(held: list[int], wanted: list[int]) -> int:
    """How many leading tokens are the same."""
    if held == wanted[: len(held)]:
        return len(held)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, wanted, strict=False)))
