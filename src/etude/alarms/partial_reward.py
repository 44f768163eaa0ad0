"""The alarm `partial_reward`: the mean reward rises, and the best answers are no better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from etude.alarms.alarm import Alarm
from etude.alarms.remedies import REMEDIES
from etude.core.distribution import Distribution
from etude.core.history import Entry
from etude.store.figures import with_rewards


class PartialReward(Alarm, name="partial_reward"):
    """The mean reward is surely above the first one, and the best reward is not, nor do more answers have it:
    the model learns to earn a part of the reward, and not to do the task."""

    by_default: ClassVar[bool] = True
    remedy: ClassVar[str] = REMEDIES["a-part-of-the-reward-is-farmed"]

    def look(self, entry: Entry, earlier: Sequence[Entry]) -> str | None:
        first = next(iter(with_rewards(earlier)), None)
        now = Distribution.among(entry.metrics)
        before = None if first is None else Distribution.among(first.metrics)
        if now is None or first is None or before is None:
            return None
        mean, high = first.metrics["avg_reward"], first.metrics["reward_high"]
        reward = entry.metrics["avg_reward"]
        full = before.best if now.full is None else now.full
        if reward <= (mean if high is None else high) or now.best > before.best:
            return ""
        if now.share_of(full) > before.share_of(full):
            return ""
        return f"the mean reward has risen from {mean:.3f} to {reward:.3f}, and the best has not: {now}"
