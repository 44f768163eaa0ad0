"""Numbers of an epoch and of a validation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from etude.algorithms.algorithm import kind_of
from etude.algorithms.episodes import reward_groups
from etude.core.evaluation import EvaluationRunOutput
from etude.core.history import History
from etude.core.stats import estimate
from etude.core.trajectory import Trajectory, TrajectoryCollection


def collection_metrics(collection: TrajectoryCollection, facts: dict[str, Any]) -> dict[str, Any]:
    """What was collected.

    `avg_reward`, `min_reward` and `max_reward` are over all scored episodes where `facts` has their
    `rewards`, and over the trajectories otherwise; None when there are none. `num_scored` is how many
    rewards those are, and their 95 % interval is `reward_low` to `reward_high`. `evaluators` has the
    mean of each evaluator's `scores`. `reward_groups` counts the groups of episodes that are `compared`
    with each other and, of those, the `flat` ones, whose rewards are all equal.
    """
    told = facts.get("rewards")
    rewards = list(told) if told is not None else _rewards(collection)
    counts = {key: value for key, value in facts.items() if key not in ("rewards", "scores")}
    return {
        **spread(rewards),
        **interval(rewards),
        "num_scored": len(rewards),
        "evaluators": evaluator_metrics(facts.get("scores") or {}),
        "num_trajectories": len(collection),
        "num_groups": len(collection.trajectories),
        **counts,
        **(
            {}
            if kind_of(collection.method) == "imitation"
            else {"reward_groups": _compared(collection, facts)}
        ),
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
    items, scores = output.results_of(evaluator), output.scores()
    rewards = scores[evaluator]
    return {
        **spread(rewards),
        **interval(rewards),
        "num_examples": len(rewards),
        "num_scored": len(rewards),
        "num_unscored": len(items) - len(rewards) + len(output.left_out),
        "evaluators": evaluator_metrics(scores),
        "failures": dict(output.failures),
        "failure_causes": [cause.model_dump() for cause in output.causes],
        "calls": dict(output.calls),
    }


def evaluator_metrics(scores: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """By evaluator: the `mean` of its scores, the 95 % interval `low` to `high`, and `n`, how many there are.

    The mean is None where nothing was scored, and the interval where the scores do not tell one.
    """
    return {name: measured_scores(values) for name, values in scores.items()}


def measured_scores(values: Sequence[float]) -> dict[str, Any]:
    """`mean`, `low`, `high` and `n` of scores, as JSON."""
    if not values:
        return {"mean": None, "low": None, "high": None, "n": 0}
    found = estimate(values)
    low, high = (bound if math.isfinite(bound) else None for bound in (found.low, found.high))
    return {"mean": found.mean, "low": low, "high": high, "n": found.n}


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
    """The 95 % interval of the average; None where the rewards do not tell one."""
    found = measured_scores(rewards)
    return {"reward_low": found["low"], "reward_high": found["high"]}


def failed_counts(metrics: Mapping[str, Any]) -> tuple[int, int]:
    """How many episodes failed, and how many scores of episodes that did not."""
    failures: Mapping[str, int] = metrics.get("failures") or {}
    scores = sum(count for kind, count in failures.items() if kind.startswith("score:"))
    return sum(failures.values()) - scores, scores


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


def _compared(collection: TrajectoryCollection, facts: Mapping[str, Any]) -> dict[str, int]:
    """Of what is trained on, where there is any: step rewards can differ where rewards are equal."""
    if not len(collection) and "reward_groups" in facts:
        return dict(facts["reward_groups"])
    shaped = [
        [*_group_rewards(group), *(reward for one in group for reward in one.shaped_rewards or ())]
        for group in collection.trajectories
    ]
    return reward_groups(shaped)


def _rewards(collection: TrajectoryCollection) -> list[float]:
    """Rewards by episode: the group's own where the builder tells them, since one may give several
    trajectories, or a pair a difference."""
    return [reward for group in collection.trajectories for reward in _group_rewards(group)]


def _group_rewards(group: Sequence[Trajectory]) -> list[float]:
    known = group[0].group_rewards if group else None
    return list(known or [trajectory.reward for trajectory in group])
