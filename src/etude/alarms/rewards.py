"""The rewards of a run as alarms compare them."""

from __future__ import annotations

from collections.abc import Sequence

from etude.core.history import Entry

_MANY_EQUAL = 5
"""Rewards outside of [0, 1] that are all equal: as many are taken for what the model always gets."""
_TENTH = 0.1


def bound_of(entry: Entry, key: str) -> float | None:
    """A bound of the reward's interval; of many equal rewards, which have none, the reward itself."""
    metrics = entry.metrics
    bound: float | None = metrics.get(key)
    if bound is None and (metrics.get("num_scored") or 0) >= _MANY_EQUAL:
        bound = metrics["avg_reward"]
    return bound


def has_learnt(entry: Entry, earlier: Sequence[Entry]) -> bool:
    """Whether the mean reward is in the highest tenth of what episodes have had: the task is learnt.

    A model that always gives the right answer says little that is new, and that is as it should be. Where all
    rewards have been equal from the start, nothing was learnt.
    """
    reward = entry.metrics.get("avg_reward")
    known = [each.metrics for each in (*earlier, entry) if each.metrics.get("max_reward") is not None]
    if reward is None or not known:
        return False
    highest = max(metrics["max_reward"] for metrics in known)
    lowest = min(metrics["min_reward"] for metrics in known)
    return bool(highest > lowest and reward >= highest - _TENTH * (highest - lowest))
