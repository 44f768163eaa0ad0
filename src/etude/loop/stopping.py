"""When to stop early: a pure function of the history, so that a resumed run decides alike."""

from __future__ import annotations

from etude.core.history import History


def scores_of(history: History) -> list[float]:
    """The rewards by which a run is judged: those of the validations, else those of the epochs."""
    entries = history.validations or history.epochs
    rewards = [entry.metrics.get("avg_reward") for entry in entries]
    return [float(reward) for reward in rewards if reward is not None]


def reason_to_stop(history: History, patience: int | None, target_reward: float | None) -> str | None:
    """Why the run should end now, or None.

    It ends when the last reward has reached `target_reward`, or when the last `patience` rewards have
    all failed to beat the best one before them.
    """
    scores = scores_of(history)
    if not scores:
        return None
    what = "validation" if history.validations else "training-episode"
    if target_reward is not None and scores[-1] >= target_reward:
        return f"the {what} reward {scores[-1]:.3f} has reached the target {target_reward:g}"
    if patience is None or len(scores) <= patience:
        return None
    best = max(scores[:-patience])
    if max(scores[-patience:]) > best:
        return None
    return f"the last {patience} {what} rewards have not beaten {best:.3f}"
