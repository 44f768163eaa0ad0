"""The slot table: which row has which slot, what earlier rows left in the others, and who can share it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from etude.core.sample import shared_length
from etude.engines.sampler import LiveRow

_FIRST_SLOTS = 8
_BLOCK = 64
"""Tokens per block, by which prompts that begin alike are found. The shared length is counted exactly."""
_LEAST = 8
"""Minimum length of a prompt that is also found as a whole, like the prompt of a group. Reading fewer tokens
is faster than waiting until another row has read them."""


@dataclass(slots=True, eq=False)
class _Held:
    """The contents of a slot, and their owner."""

    slot: int
    conversation: str = ""
    ids: list[int] = field(default_factory=list)
    """The row's own ids while it is in the slot; later the tokens that it left."""
    row: LiveRow | None = None
    blocks: list[int] = field(default_factory=list)
    """Keys in the table's `_blocks` that lead to this slot."""
    uses: int = 0
    """How often other rows began with its tokens; halved each time this saves the slot."""

    @property
    def length(self) -> int:
        """Number of tokens whose keys and values are in the slot."""
        return len(self.ids) if self.row is None else self.row.cached


@dataclass(frozen=True, slots=True)
class Copy:
    """Leading tokens of one slot to copy into another."""

    source: int
    target: int
    length: int


class SlotTable:
    """Slots by number, made as they are needed."""

    def __init__(self, kept: int, least: int) -> None:
        """Up to `kept` slots keep the tokens of finished rows; `least` slots exist from the start."""
        self._kept = kept
        self._held: list[_Held] = []
        self._unused: list[_Held] = []
        self._idle: dict[_Held, None] = {}
        """Used and released slots, the one released longest ago first."""
        self._blocks: dict[int, dict[_Held, None]] = {}
        """For a hash of all tokens up to a block's end, the slots that begin with them, in order."""
        self._waiting: dict[LiveRow, tuple[LiveRow, int]] = {}
        """Rows that will copy this many tokens from another row, once it has read them."""
        self._copies: list[tuple[LiveRow, Copy]] = []
        self._grow(max(least, min(kept, _FIRST_SLOTS)))

    def __len__(self) -> int:
        return len(self._held)

    def lengths(self) -> list[int]:
        """Return the number of tokens in each slot, including those still to be copied from it."""
        lengths = [held.length for held in self._held]
        for _, copy in self._copies:  # The slot may already have a new row, which has read nothing yet.
            lengths[copy.source] = max(lengths[copy.source], copy.length)
        return lengths

    def place(self, row: LiveRow, *, reuse: bool) -> None:
        """Give the row a slot: its own conversation's, else an unused one, else the one released longest ago.

        With `reuse`, the tokens that it shares with its conversation's slot count as read. If it shares more
        with another slot, `copies` will copy them from there.
        """
        held, shared = self._best_own(row) if reuse else (None, 0)
        source, more = self._find_similar_slot(row) if reuse else (None, 0)
        if source is not None and source is not held and more > shared:
            source.uses += 1
            held, leader, slot = held or self._find_free_slot(), source.row, source.slot
            if leader is None:
                self._copies.append((row, Copy(slot, held.slot, more)))
            else:
                self._waiting[row] = (leader, more)
        held = held or self._find_free_slot()
        self._idle.pop(held, None)
        for block in held.blocks:
            holders = self._blocks[block]
            del holders[held]
            if not holders:
                del self._blocks[block]
        held.row, held.conversation, held.ids = row, row.conversation, row.ids
        row.slot, row.cached = held.slot, shared
        held.blocks = [*_blocks(held.ids)] if reuse else []
        for block in held.blocks:
            self._blocks.setdefault(block, {})[held] = None

    def waits(self, row: LiveRow) -> bool:
        """Return whether the row must wait, because another row is about to read the same tokens."""
        return row in self._waiting

    def copies(self) -> list[Copy]:
        """Return the copies to make now, before any slot is written to; their tokens count as read."""
        ready, self._copies = self._copies, []
        for row, (leader, length) in list(self._waiting.items()):
            is_here = self._held[leader.slot].row is leader
            if is_here and leader.cached >= length:
                ready.append((row, Copy(leader.slot, row.slot, length)))
            if not is_here or leader.cached >= length:
                del self._waiting[row]  # Without its leader, the row reads the tokens itself.
        for row, copy in ready:
            row.cached = copy.length
        return [copy for _, copy in ready]

    def release(self, row: LiveRow) -> None:
        """Keep the tokens that the row read for its conversation's next turn."""
        self._waiting.pop(row, None)
        if row.slot >= 0:
            held = self._held[row.slot]
            held.row, held.ids = None, row.ids[: row.cached]
            self._idle[held] = None

    def forget(self) -> None:
        """Invalidate the contents of all slots; rows in them are read again from the start."""
        self._blocks.clear()
        for held in self._held:
            held.blocks, held.uses = [], 0
            if held.row is None:
                held.ids = []
            else:
                held.row.cached = 0

    def swap(self, first: int, second: int) -> tuple[Copy, Copy]:
        """Exchange two slots; return the two copies to make at the same time."""
        held = self._held
        pair = held[first], held[second]
        lengths = [slot.length for slot in pair]
        held[second], held[first] = pair
        for slot in (first, second):
            held[slot].slot, row = slot, held[slot].row
            if row is not None:
                row.slot = slot
        return Copy(first, second, lengths[0]), Copy(second, first, lengths[1])

    def _best_own(self, row: LiveRow) -> tuple[_Held | None, int]:
        """Return the idle slot of the row's conversation with most of its tokens, and how many."""
        best, most = None, 0
        for held in self._idle:
            if held.conversation == row.conversation:
                # The last token is always read again, because its logits are needed.
                shared = min(shared_length(held.ids, row.ids), len(row.ids) - 1)
                if shared > most:
                    best, most = held, shared
        return best, most

    def _find_similar_slot(self, row: LiveRow) -> tuple[_Held | None, int]:
        """Return a slot that begins, or will begin, with most of the row's tokens, and with how many."""
        best = None
        for block in _blocks(row.ids):
            if block not in self._blocks:
                break
            best = next(iter(self._blocks[block]))
        return (None, 0) if best is None else (best, min(shared_length(best.ids, row.ids), len(row.ids) - 1))

    def _find_free_slot(self) -> _Held:
        """Return a slot of any conversation: an unused or new one, else the one released longest ago.

        A slot whose tokens other rows began with is spared, the more often the longer. So system prompts
        outlive the time between two uses.
        """
        if not self._unused and (len(self) < self._kept or not self._idle):
            self._grow(max(len(self), _FIRST_SLOTS) if len(self) < self._kept else len(self) // 2)
        if self._unused:
            return self._unused.pop()
        while (oldest := next(iter(self._idle))).uses:
            oldest.uses //= 2
            del self._idle[oldest]
            self._idle[oldest] = None
        return oldest

    def _grow(self, count: int) -> None:
        made = [_Held(slot) for slot in range(len(self), len(self) + count)]
        self._held += made
        self._unused = [*reversed(made), *self._unused]


def _blocks(ids: list[int]) -> Iterator[int]:
    """Yield a hash of all tokens up to the end of each whole block, and one of all tokens."""
    block = end = 0
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        block = hash((block, *ids[end - _BLOCK : end]))
        yield block
    if end < len(ids) >= _LEAST:
        yield hash((block, *ids[end:]))
