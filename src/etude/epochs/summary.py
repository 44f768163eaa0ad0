"""What a run amounts to, and why an epoch had nothing to train on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.core.history import History, ValidationEntry
from etude.epochs.versions import best_version, last_version


def summary_of(history: History) -> dict[str, Any]:
    """The run in numbers, as JSON.

    `before` and `after` are the first and the last validation (None without), or else the rewards of
    the first and the last epoch's episodes; `measured_on` says which.
    """
    best, last = best_version(history), last_version(history)
    return {
        "run_id": history.run_id,
        "epochs_trained": len(history.trained),
        "epochs_skipped": len(history.skipped),
        "skip_reasons": sorted({entry.skipped for entry in history.skipped if entry.skipped is not None}),
        "measured_on": "validation" if history.validations else "training episodes",
        "before": _ends(history, 0),
        "after": _ends(history, -1),
        "best_version": None if best is None else best.model_dump(mode="json"),
        "last_version": None if last is None else last.model_dump(mode="json"),
    }


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


def _ends(history: History, place: int) -> dict[str, Any] | None:
    entries = history.validations or history.epochs
    if not entries:
        return None
    entry = entries[place]
    count = "num_examples" if isinstance(entry, ValidationEntry) else "episodes"
    measured = {key: entry.metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high")}
    return {"epoch": entry.epoch, "n": entry.metrics.get(count), **measured}
