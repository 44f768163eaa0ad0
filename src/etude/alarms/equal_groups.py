"""The alarm `equal_groups`: of the episodes that are compared with each other none has an advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm
from etude.alarms.rewards import has_learnt
from etude.core.history import Entry


class EqualGroups(Alarm, name="equal_groups"):
    """Within most groups of episodes none has an advantage (`reward_groups` of the metrics), as where all
    rewards are equal. And the reward is not in the highest tenth of what episodes have had."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = "take harder or easier examples, more generations of each, or a finer reward"

    at_least: float = Field(default=1.0, gt=0, le=1)
    """The share of the groups that is too many."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        groups = entry.metrics.get("reward_groups") or {}
        if not groups.get("compared"):
            return None
        compared, flat = groups["compared"], groups["flat"]
        if flat < self.at_least * compared or has_learnt(entry, earlier):
            return ""
        which = f"each of the {compared} groups" if flat == compared else f"{flat} of {compared} groups"
        return f"within {which} no episode has an advantage, so there is nothing to learn from comparing them"
