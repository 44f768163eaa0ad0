"""The metrics of epochs and validations, and the decisions made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from etude.core.episode import cut_off_share
from etude.core.evaluation import EvaluationRunOutput
from etude.core.history import History
from etude.core.sample import GroupFigures
from etude.core.stats import Bounds, Distribution, estimate

_RAW = ("rewards", "scores", "bounds", "reward")
"""Facts that metrics are computed from, and that are not metrics themselves."""


def collection_metrics(
    groups: Sequence[GroupFigures], facts: dict[str, Any], *, compares: bool = True
) -> dict[str, Any]:
    """Return the figures of a collection.

    The figures of `reward_metrics` cover all scored episodes if `facts` has their `rewards`, else the
    trajectories. `evaluators` has the mean of each evaluator's `scores`, within its `bounds`. `reward` names
    the evaluator whose scores are the rewards, unless the builder shapes them. `reward_groups` counts the
    groups of episodes that are `compared` with each other, if the algorithm `compares` any. Of these, the
    `flat` ones have no advantage: the builder says so, or else all rewards are equal.
    """
    rewards, scores, bounds = facts.get("rewards"), facts.get("scores") or {}, facts.get("bounds") or {}
    rewards = _rewards(groups) if rewards is None else rewards
    is_shaped = sorted(rewards) != sorted(scores.get(facts.get("reward"), ()))
    metrics = {
        **reward_metrics(rewards, None if is_shaped else bounds.get(facts.get("reward"))),
        "evaluators": _by_evaluator(scores, bounds),
        "num_trajectories": sum(group.size for group in groups),
        "num_groups": len(groups),
        **{key: value for key, value in facts.items() if key not in _RAW},
    }
    if compares and "reward_groups" not in facts:
        # Step rewards can differ even if rewards are equal.
        earned = [own for group in groups if len(own := [*group.rewards, *group.returns]) > 1]
        flat = sum(len({*own}) == 1 for own in earned)
        metrics["reward_groups"] = {"compared": len(earned), "flat": flat}
    return metrics


def selection_metrics(selected: Sequence[GroupFigures]) -> dict[str, Any]:
    """Return the figures of the data that the curriculum selected."""
    rewards = reward_metrics(_rewards(selected))
    return {
        "filtered_trajectories": sum(group.size for group in selected),
        "filtered_groups": len(selected),
        **{f"filtered_{key}": rewards[key] for key in ("avg_reward", "min_reward", "max_reward")},
    }


def validation_metrics(output: EvaluationRunOutput, evaluator: str) -> dict[str, Any]:
    """Return the rewards on the validation examples. Unscored items are counted, and never a zero."""
    items, scores, bounds = output.evaluator_items(evaluator), output.scores(), output.bounds()
    rewards = scores[evaluator]
    return {
        **reward_metrics(rewards, bounds[evaluator]),
        "num_examples": len(rewards),
        "num_unscored": len(items) - len(rewards) + len(output.left_out),
        "evaluators": _by_evaluator(scores, bounds),
        **call_metrics(output),
    }


def call_metrics(output: EvaluationRunOutput) -> dict[str, Any]:
    """Return figures of the episodes' failures and of the model calls."""
    return {
        "failures": dict(output.failures),
        "failure_causes": [cause.model_dump() for cause in output.causes],
        "calls": dict(output.calls),
        "remote": output.remote(),
        "cut_off_share": cut_off_share(output.calls),
    }


def reward_metrics(rewards: Sequence[float], bounds: Bounds | None = None) -> dict[str, Any]:
    """Return `avg_reward`, `min_reward`, `max_reward`, `num_scored`, `reward_low`/`_high`, `distribution`.

    `reward_low` to `reward_high` is the 95 % interval of the average within the declared `bounds`, or None if
    the rewards give none. Without rewards `num_scored` is 0 and all others are None.
    """
    mean = measured_scores(rewards, bounds)
    return {
        "avg_reward": mean["mean"],
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "reward_low": mean["low"],
        "reward_high": mean["high"],
        "num_scored": mean["n"],
        "distribution": Distribution.build(rewards, bounds).model_dump(mode="json") if rewards else None,
    }


def measured_scores(values: Sequence[float], bounds: Bounds | None = None) -> dict[str, Any]:
    """Return `mean`, `low`, `high` (95 %) and `n` of scores, as JSON, and their declared `bounds`. The mean
    is None if nothing was scored, and the interval if the scores do not determine one."""
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
    """Return why nothing in a collection can be trained on, in one sentence."""
    reasons = [f"{count} × {reason}" for reason, count in sorted(metrics.get("left_out", {}).items())]
    if metrics.get("untargeted"):
        lack = "episode without an answered call to the target functions and model"
        reasons.append(f"{metrics['untargeted']} × {lack}")
    if metrics.get("unscored"):
        reasons.append(f"{metrics['unscored']} × episode without a reward")
    if metrics.get("num_groups"):
        flat = metrics.get("curriculum_flat_groups", metrics["num_groups"])
        reasons.append(f"{flat} × group whose rewards differ by less than the curriculum's min_reward_diff")
    rewards = Distribution.from_metrics(metrics)
    if rewards is not None and rewards.best_count == rewards.n:
        highest = ", the highest there is" if rewards.best == rewards.full else ""
        reasons.append(f"every reward is {rewards.best:g}{highest}")
    return "nothing to train on: " + ("; ".join(reasons) or "no trajectories were built")


def reason_to_stop(history: History, patience: int | None, target_reward: float | None) -> str | None:
    """Return why the run should end now, or None. This is a pure function, so a resumed run decides alike.

    It ends when the last reward has reached `target_reward`, or none of the last `patience` rewards beats the
    best one before them: rewards of validations if there are any, else of epochs.
    """
    rewards = (entry.reward.mean for entry in history.validations or history.epochs)
    scores = [reward for reward in rewards if reward is not None]
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


def _rewards(groups: Sequence[GroupFigures]) -> list[float]:
    return [reward for group in groups for reward in group.rewards]
