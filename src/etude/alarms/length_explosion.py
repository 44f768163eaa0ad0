"""The alarm `length_explosion`: answers have become much longer all at once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm
from etude.core.history import Entry


class LengthExplosion(Alarm, name="length_explosion"):
    """Answers (`answer_tokens` of the metrics) are several times as long as in the epochs before."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "the model may have found that long answers pay, or has stopped ending them: read some, and see "
        "whether the reward or a penalty for cut off answers should say otherwise"
    )

    above: float = Field(default=3.0, gt=1)
    """How many times as long as the median of the epochs before they may be."""
    recent: int = Field(default=5, ge=1)
    """How many epochs before are looked at."""
    least: int = Field(default=32, ge=0)
    """Tokens of a mean answer that are never too many."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        length = entry.metrics.get("answer_tokens")
        if length is None:
            return None
        known = [value for each in earlier if (value := each.metrics.get("answer_tokens")) is not None]
        if not known or length <= self.least:
            return ""
        usual = statistics.median(known[-self.recent :])
        if length <= self.above * usual:
            return ""
        return f"answers have {length:.1f} tokens on average, where they had {usual:.1f} before"
