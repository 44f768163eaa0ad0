"""The metrics of an epoch and of a validation, and what is decided by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from etude.algorithms.algorithm import kind_of
from etude.algorithms.episodes import reward_groups
from etude.core.evaluation import EvaluationRunOutput
from etude.core.history import History
from etude.core.stats import estimate
from etude.core.trajectory import TrajectoryCollection
from etude.loop.curriculum import rewards_of


def collection_metrics(collection: TrajectoryCollection, facts: dict[str, Any]) -> dict[str, Any]:
    """The figures of what was collected.

    `avg_reward`, `min_reward` and `max_reward` are over all scored episodes where `facts` has their
    `rewards`, and over the trajectories otherwise; None when there are none. `num_scored` is how many
    rewards those are, and their 95 % interval is `reward_low` to `reward_high`. `evaluators` has the
    mean of each evaluator's `scores`. `reward_groups` counts the groups of episodes that are `compared`
    with each other and, of those, the `flat` ones, whose rewards are all equal.
    """
    known = facts.get("rewards")
    rewards = _rewards(collection) if known is None else list(known)
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
    """The figures of what is left after the curriculum."""
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
    mean = estimate(values)
    low, high = (bound if math.isfinite(bound) else None for bound in (mean.low, mean.high))
    return {"mean": mean.mean, "low": low, "high": high, "n": mean.n}


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
    mean = measured_scores(rewards)
    return {"reward_low": mean["low"], "reward_high": mean["high"]}


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
    scores = scores_of(history)
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


def _compared(collection: TrajectoryCollection, facts: Mapping[str, Any]) -> dict[str, int]:
    """Of what is trained on, where there is any: step rewards can differ where rewards are equal."""
    if not len(collection) and "reward_groups" in facts:
        return dict(facts["reward_groups"])
    shaped = [
        [*rewards_of(group), *(reward for each in group for reward in each.shaped_rewards or ())]
        for group in collection.trajectories
    ]
    return reward_groups(shaped)


def _rewards(collection: TrajectoryCollection) -> list[float]:
    """Rewards by episode: the group's own where the builder tells them, since one may give several
    trajectories, or a pair a difference."""
    return [reward for group in collection.trajectories for reward in rewards_of(group)]
