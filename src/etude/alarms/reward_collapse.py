"""The alarm `reward_collapse`: the reward is far below what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from etude.alarms.alarm import Alarm
from etude.alarms.remedies import REMEDIES
from etude.alarms.rewards import bound_of
from etude.core.history import Entry, ValidationEntry
from etude.store.figure_words import shown_reward
from etude.store.figures import measured, version_of, with_rewards


class RewardCollapse(Alarm, name="reward_collapse"):
    """The reward is below what it was: by default surely below the first one, that is, their intervals do not
    touch."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["the-reward-falls"]

    below: float | None = Field(default=None, gt=0, lt=1)
    """The share of the earlier reward that it has to stay above, in place of the intervals. Of a reward r
    that is negative, it may fall by (1 - below)·|r|."""
    of: Literal["first", "best"] = "first"
    """The earlier reward that it is compared with."""

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        known = with_rewards(earlier)
        if entry.metrics.get("avg_reward") is None:
            return None
        if not known:
            return ""
        before = known[0] if self.of == "first" else max(known, key=lambda each: each.metrics["avg_reward"])
        if not self._is_below(entry, before):
            return ""
        end, start = (f"{shown_reward(each.metrics)} ({measured(each)})" for each in (entry, before))
        return f"the reward has collapsed to {end} from {start}: {_meaning(before, entry)}"

    def _is_below(self, now: Entry, before: Entry) -> bool:
        if self.below is not None:
            start = before.metrics["avg_reward"]
            return bool(now.metrics["avg_reward"] < start - (1 - self.below) * abs(start))
        high, low = bound_of(now, "reward_high"), bound_of(before, "reward_low")
        return high is not None and low is not None and high < low


def _meaning(before: Entry, now: Entry) -> str:
    """Less certain where something else than the model has changed too."""
    earlier, later = version_of(before), version_of(now)
    model = "the model" if later is None else f"v{later}"
    start = f"v{earlier}" if earlier else "the model that training began with"
    if "target" in now.metrics:
        return f"{model} may be worse than {start}, or the others have got better"
    if isinstance(now, ValidationEntry):
        return f"{model} is worse than {start}"
    return f"{model} may be worse than {start}, or the examples of the epoch harder"
