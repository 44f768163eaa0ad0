"""Which rows read drafts in the next forward pass, and how long these are: as it is likely to pay."""

from __future__ import annotations

from collections.abc import Sequence

from etude.inference.prompt_lookup import MOST, PromptLookup
from etude.inference.sampler import Row

_MOST_ROWS = 16
"""Rows at a time above which a wider pass costs more than drafts can gain."""
_LEAST_GAIN = 1.1
"""Tokens for the same time with drafts over those without, by estimate, from which on they are read."""
_FIRST_RATE = 0.5
_OWN_WEIGHT, _COMMON_WEIGHT = 1 / 8, 1 / 32
"""Of the last outcome in the rate of the row, and in that which new rows begin with."""
_PER_TOKEN = 1 / 32
"""Time that a token more in a pass takes, over that of a pass of one."""
_APART, _APART_SMALL = 0.1, 1.2
"""Time that a pass of several tokens a row takes more for itself; of small models, which compute little."""


class Drafter:
    """Drafts for rows that speak. How often they come true is seen at each token, also of those not read."""

    def __init__(self, *, is_small: bool) -> None:
        """`is_small`: of a model whose steps are mostly calls, whatever they compute."""
        self._apart = _APART_SMALL if is_small else _APART
        self._rate = _FIRST_RATE

    def drafts(self, rows: Sequence[Row]) -> list[list[int]]:
        """A draft for each row, some of them empty; no draft at all where it is not likely to pay."""
        if len(rows) > _MOST_ROWS:
            return []
        drafts = [self._draft(row) for row in rows]
        if not any(drafts):
            return []
        width = self._best_width(rows, drafts)
        return [draft[: width - 1] for draft in drafts] if width > 1 else []

    def _draft(self, row: Row) -> list[int]:
        if row.top or (row.shaper is not None and not row.shaper.is_constant):
            return []
        lookup = row.lookup
        if lookup is None:
            lookup = row.lookup = PromptLookup(self._rate)
        for is_right in lookup.outcomes(row.ids):
            lookup.rate += (is_right - lookup.rate) * _OWN_WEIGHT
            self._rate += (is_right - self._rate) * _COMMON_WEIGHT
        return lookup.draft(row.ids)

    def _best_width(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> int:
        """Tokens that each row is to read next, 1 for no drafts. A pass has one width for all."""
        drafting = [
            (row.lookup.rate, len(draft)) for row, draft in zip(rows, drafts, strict=True) if row.lookup
        ]
        powers = [1.0] * len(drafting)
        tokens, best, most = float(len(rows)), 1, _LEAST_GAIN
        single = 1 + _PER_TOKEN * len(rows)
        for width in range(2, MOST + 2):
            powers = [
                power * rate * (length >= width - 1)
                for power, (rate, length) in zip(powers, drafting, strict=True)
            ]
            tokens += sum(powers)
            cost = (1 + self._apart + _PER_TOKEN * len(rows) * width) / single
            if tokens / len(rows) > most * cost:
                best, most = width, tokens / len(rows) / cost
        return best
