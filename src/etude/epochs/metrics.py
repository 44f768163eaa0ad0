"""Numbers of an epoch and of a validation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from etude.core.evaluation import EvaluationRunOutput
from etude.core.history import History
from etude.core.stats import estimate
from etude.core.trajectory import Trajectory, TrajectoryCollection


def collection_metrics(collection: TrajectoryCollection, facts: dict[str, Any]) -> dict[str, Any]:
    """What was collected.

    `avg_reward`, `min_reward` and `max_reward` are over all scored episodes where the builder's facts
    tell their `rewards`, and over the trajectories otherwise; None when there are none. The interval of
    the average is `reward_low` to `reward_high`, 95 %.
    """
    told = facts.get("rewards")
    rewards = list(told) if told is not None else _rewards(collection)
    counts = {key: value for key, value in facts.items() if key != "rewards"}
    return {
        **spread(rewards),
        **interval(rewards),
        "num_trajectories": len(collection),
        "num_groups": len(collection.trajectories),
        **counts,
    }


def selection_metrics(selected: TrajectoryCollection) -> dict[str, Any]:
    """What is left after the curriculum."""
    return {
        "filtered_trajectories": len(selected),
        "filtered_groups": len(selected.trajectories),
        **{f"filtered_{key}": value for key, value in spread(_rewards(selected)).items()},
    }


def validation_metrics(output: EvaluationRunOutput, evaluator: str) -> dict[str, Any]:
    """Rewards on the validation examples. Items without a score are excluded and counted, never zero."""
    items = output.results_of(evaluator)
    rewards = [item.score for item in items if item.is_scored and item.score is not None]
    return {
        **spread(rewards),
        **interval(rewards),
        "num_examples": len(rewards),
        "num_unscored": len(items) - len(rewards) + len(output.left_out),
        "failures": dict(output.failures),
    }


def spread(rewards: Sequence[float]) -> dict[str, float | None]:
    """Average, least and greatest reward; None for no rewards."""
    if not rewards:
        return {"avg_reward": None, "min_reward": None, "max_reward": None}
    return {
        "avg_reward": math.fsum(rewards) / len(rewards),
        "min_reward": min(rewards),
        "max_reward": max(rewards),
    }


def interval(rewards: Sequence[float]) -> dict[str, float | None]:
    """The 95 % interval of the average."""
    if not rewards:
        return {"reward_low": None, "reward_high": None}
    found = estimate(rewards)
    return {"reward_low": found.low, "reward_high": found.high}


def drift_of(history: History) -> Counter[str]:
    """Branches of all epochs that began because a template wrote something differently, by what that was."""
    return sum((Counter(entry.metrics.get("drift") or {}) for entry in history.epochs), Counter[str]())


def finite(value: Any) -> Any:
    """The value as JSON that every reader takes: numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((finite(one) for one in value), key=str)
    return value


def _rewards(collection: TrajectoryCollection) -> list[float]:
    """Rewards by episode: the group's own where the builder tells them, since one may give several
    trajectories, or a pair a difference."""
    return [reward for group in collection.trajectories for reward in _group_rewards(group)]


def _group_rewards(group: Sequence[Trajectory]) -> list[float]:
    told = (group[0].metadata or {}).get("group_rewards") if group else None
    return list(told) if told else [trajectory.reward for trajectory in group]
