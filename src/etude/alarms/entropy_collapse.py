"""The alarm `entropy_collapse`: the model hardly tries anything else any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm
from etude.alarms.remedies import REMEDIES
from etude.alarms.rewards import has_learnt
from etude.core.history import Entry


class EntropyCollapse(Alarm, name="entropy_collapse"):
    """The entropy of sampled tokens (`sampled_entropy` of the metrics) is a small part of that of the first
    epoch, and the reward is not in the highest tenth of what episodes have had."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["all-attempts-are-alike"]

    epochs: int = Field(default=2, ge=1)
    """Epochs in a row before it rings."""
    below: float = Field(default=0.05, gt=0, lt=1)
    """The share of the first epoch's entropy that it has to stay above."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        entropy = entry.metrics.get("sampled_entropy")
        if entropy is None:
            return None
        known = (each.metrics.get("sampled_entropy") for each in earlier)
        first = next((value for value in known if value is not None), None)
        if first is None or entropy >= self.below * first or has_learnt(entry, earlier):
            return ""
        return f"the entropy of sampled tokens has collapsed to {entropy:.3g} nats a token from {first:.3g}"
