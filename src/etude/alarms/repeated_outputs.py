"""The alarm `repeated_outputs`: the model says the same in all attempts at an example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm
from etude.alarms.remedies import REMEDIES
from etude.alarms.rewards import has_learnt
from etude.core.history import Entry


class RepeatedOutputs(Alarm, name="repeated_outputs"):
    """Nearly all attempts at an example are the same, word for word (`repeated_share` of the metrics), and
    the reward is not in the highest tenth of what episodes have had."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["all-attempts-are-alike"]

    epochs: int = Field(default=2, ge=1)
    """Epochs in a row before it rings."""
    above: float = Field(default=0.95, ge=0, lt=1)
    """The share of repeated attempts that may be."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        share = entry.metrics.get("repeated_share")
        if share is None:
            return None
        if share <= self.above or has_learnt(entry, earlier):
            return ""
        return f"{100 * share:.0f} % of the attempts at the same example repeat another one word for word"
