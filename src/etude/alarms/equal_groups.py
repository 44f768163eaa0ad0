"""The alarm `equal_groups`: of the episodes that are compared with each other none has an advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from etude.alarms.alarm import Alarm, Sighting, Sightings
from etude.alarms.remedies import REMEDIES
from etude.alarms.rewards import has_learnt
from etude.core.distribution import Distribution
from etude.core.history import Entry

_FEW = 0.05
"""The share of answers with the full reward below which examples help more than other groups."""


class EqualGroups(Alarm, name="equal_groups"):
    """Within most groups of episodes none has an advantage (`reward_groups` of the metrics), as where all
    rewards are equal. And the reward is not in the highest tenth of what episodes have had."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["most-groups-are-flat"]

    at_least: float = Field(default=0.8, gt=0, le=1)
    """The share of the groups that is too many."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> Sightings | None:
        groups = entry.metrics.get("reward_groups") or {}
        if not groups.get("compared"):
            return None
        compared, flat = groups["compared"], groups["flat"]
        if flat < self.at_least * compared or has_learnt(entry, earlier):
            return {}
        which = f"each of the {compared} groups" if flat == compared else f"{flat} of {compared} groups"
        rewards = Distribution.among(entry.metrics)
        shown = "" if rewards is None else f" (rewards {rewards.shown_bars()})"
        text = f"within {which} no episode has an advantage over the others{shown}"
        return {"": Sighting(text, remedy=_remedy(rewards))}


def _remedy(rewards: Distribution | None) -> str:
    """The one that fits the share of answers with the full reward."""
    right = None if rewards is None or rewards.full is None else rewards.share_of(rewards.full)
    if right is None or _FEW <= right < 1:
        return REMEDIES["most-groups-are-flat"]
    return REMEDIES["no-answer-is-right" if right < _FEW else "nothing-is-left-to-learn"]
