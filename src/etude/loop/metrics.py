"""The metrics of an epoch and of a validation, and what is decided by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from etude.algorithms.algorithm import kind_of
from etude.algorithms.episodes import UnitGroup, reward_groups
from etude.core.distribution import Distribution
from etude.core.edge import TrajectoryCollection
from etude.core.episode import cut_off_share
from etude.core.evaluation import EvaluationRunOutput
from etude.core.history import History
from etude.core.stats import Bounds, estimate
from etude.loop.curriculum import rewards_of

_RAW = ("rewards", "scores", "bounds", "reward")
"""Facts that metrics are made of."""


def collection_metrics(collection: TrajectoryCollection, facts: dict[str, Any]) -> dict[str, Any]:
    """The figures of what was collected.

    Those of `reward_metrics` are over all scored episodes where `facts` has their `rewards`, and over the
    trajectories otherwise. `evaluators` has the mean of each evaluator's `scores`, within its `bounds`;
    `reward` is the one whose scores are the rewards, unless the builder shapes them. `reward_groups` counts
    the groups of episodes that are `compared` with each other and, of those, the `flat` ones, in which there
    is no advantage: as the builder says, or else those whose rewards are all equal.
    """
    rewards, scores, bounds = facts.get("rewards"), facts.get("scores") or {}, facts.get("bounds") or {}
    rewards = _rewards(collection) if rewards is None else rewards
    is_shaped = sorted(rewards) != sorted(scores.get(facts.get("reward"), ()))
    metrics = {
        **reward_metrics(rewards, None if is_shaped else bounds.get(facts.get("reward"))),
        "evaluators": _by_evaluator(scores, bounds),
        "num_trajectories": len(collection),
        "num_groups": len(collection.groups),
        **{key: value for key, value in facts.items() if key not in _RAW},
    }
    if kind_of(collection.method) != "imitation" and "reward_groups" not in facts:
        # Step rewards can differ where rewards are equal.
        shaped = [
            [*rewards_of(group), *(reward for each in group for reward in each.shaped_rewards or ())]
            for group in collection.trajectories
        ]
        groups = [UnitGroup([], own) for own in shaped]
        metrics["reward_groups"] = reward_groups(groups, [len({*own}) > 1 for own in shaped])
    return metrics


def selection_metrics(selected: TrajectoryCollection) -> dict[str, Any]:
    """The figures of what is left after the curriculum."""
    rewards = reward_metrics(_rewards(selected))
    return {
        "filtered_trajectories": len(selected),
        "filtered_groups": len(selected.groups),
        **{f"filtered_{key}": rewards[key] for key in ("avg_reward", "min_reward", "max_reward")},
    }


def validation_metrics(output: EvaluationRunOutput, evaluator: str) -> dict[str, Any]:
    """Rewards on the validation examples. Items without a score are excluded and counted, never zero."""
    items, scores, bounds = output.results_of(evaluator), output.scores(), output.bounds()
    rewards = scores[evaluator]
    return {
        **reward_metrics(rewards, bounds[evaluator]),
        "num_examples": len(rewards),
        "num_unscored": len(items) - len(rewards) + len(output.left_out),
        "evaluators": _by_evaluator(scores, bounds),
        **call_metrics(output),
    }


def call_metrics(output: EvaluationRunOutput) -> dict[str, Any]:
    """How the episodes and the calls of their models went."""
    return {
        "failures": dict(output.failures),
        "failure_causes": [cause.model_dump() for cause in output.causes],
        "calls": dict(output.calls),
        "remote": output.remote(),
        "cut_off_share": cut_off_share(output.calls),
    }


def reward_metrics(rewards: Sequence[float], bounds: Bounds | None = None) -> dict[str, Any]:
    """`avg_reward`, `min_reward`, `max_reward`, `num_scored`, `reward_low` to `reward_high`, `distribution`.

    `reward_low` to `reward_high` is the 95 % interval of the average, within the `bounds` that were declared;
    None where the rewards do not tell one. All are None where there are no rewards.
    """
    mean = measured_scores(rewards, bounds)
    return {
        "avg_reward": mean["mean"],
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "reward_low": mean["low"],
        "reward_high": mean["high"],
        "num_scored": mean["n"],
        "distribution": Distribution.of(rewards, bounds).model_dump(mode="json") if rewards else None,
    }


def measured_scores(values: Sequence[float], bounds: Bounds | None = None) -> dict[str, Any]:
    """`mean`, `low`, `high` and `n` of scores, as JSON; and `bounds`, where they were declared.

    The mean is None where nothing was scored, and the 95 % interval where the scores do not tell one.
    """
    if not values:
        return {"mean": None, "low": None, "high": None, "n": 0}
    mean = estimate(values, bounds)
    is_known = math.isfinite(mean.high - mean.low)
    low, high = (mean.low, mean.high) if is_known else (None, None)
    declared = {} if bounds is None else {"bounds": list(bounds)}
    return {"mean": mean.mean, "low": low, "high": high, "n": mean.n, **declared}


def _by_evaluator(
    scores: Mapping[str, Sequence[float]], bounds: Mapping[str, Bounds | None]
) -> dict[str, dict[str, Any]]:
    return {name: measured_scores(values, bounds.get(name)) for name, values in scores.items()}


def reason_for_skip(metrics: Mapping[str, Any]) -> str:
    """Why nothing of what was collected can be trained on, in one sentence."""
    reasons = [f"{count} × {reason}" for reason, count in sorted(metrics.get("left_out", {}).items())]
    if metrics.get("untargeted"):
        reasons.append(f"{metrics['untargeted']} × episode without a call to the target functions and model")
    if metrics.get("unscored"):
        reasons.append(f"{metrics['unscored']} × episode without a reward")
    if metrics.get("num_groups"):
        flat = metrics.get("curriculum_flat_groups", metrics["num_groups"])
        reasons.append(f"{flat} × group whose rewards differ by less than the curriculum's min_reward_diff")
    rewards = Distribution.among(metrics)
    if rewards is not None and rewards.best_count == rewards.n:
        highest = ", the highest there is" if rewards.best == rewards.full else ""
        reasons.append(f"every reward is {rewards.best:g}{highest}")
    return "nothing to train on: " + ("; ".join(reasons) or "no trajectories were built")


def scores_of(history: History) -> list[float]:
    """The rewards by which a run is judged: those of the validations, else those of the epochs."""
    entries = history.validations or history.epochs
    rewards = [entry.metrics.get("avg_reward") for entry in entries]
    return [float(reward) for reward in rewards if reward is not None]


def reason_to_stop(history: History, patience: int | None, target_reward: float | None) -> str | None:
    """Why the run should end now, or None: a pure function, so that a resumed run decides alike.

    It ends when the last reward has reached `target_reward`, or when the last `patience` rewards have
    all failed to beat the best one before them.
    """
    scores = scores_of(history) if patience is not None or target_reward is not None else []
    if not scores:
        return None
    kind = "validation" if history.validations else "training-episode"
    if target_reward is not None and scores[-1] >= target_reward:
        return f"the {kind} reward {scores[-1]:.3f} has reached the target {target_reward:g}"
    if patience is None or len(scores) <= patience:
        return None
    best = max(scores[:-patience])
    if max(scores[-patience:]) > best:
        return None
    return f"the last {patience} {kind} rewards have not beaten {best:.3f}"


def _rewards(collection: TrajectoryCollection) -> list[float]:
    """Rewards by episode: the group's own where the builder tells them, since one may give several
    trajectories, or a pair a difference."""
    return [reward for group in collection.groups for reward in rewards_of(group)]
