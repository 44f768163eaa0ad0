"""The alarm `cut_off_answers`: many answers do not come to their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm
from etude.alarms.remedies import REMEDIES
from etude.core.episode import cut_off_share
from etude.core.history import Entry


class CutOffAnswers(Alarm, name="cut_off_answers"):
    """Many answers are cut off at the limit of tokens (`cut_off_share` of the metrics)."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["answers-are-cut-off"]

    above: float = Field(default=0.2, ge=0, lt=1)
    """The share of all answers that may be."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        calls = entry.metrics.get("calls") or {}
        return self.seen_in(calls) if calls.get("answers") else None

    def seen_in(self, calls: Mapping[str, int]) -> str:
        """The sentence about counted calls, where too many answers were cut off; else an empty text."""
        share = cut_off_share(calls)
        if share is None or share <= self.above:
            return ""
        counts = f"{calls['cut_off']} of {calls['answers']} answers ({100 * share:.0f} %)"
        return f"{counts} were cut off at the limit of tokens"
