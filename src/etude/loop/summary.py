"""What a run amounts to, and why an epoch had nothing to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.core.errors import TrainingError
from etude.core.history import History
from etude.core.job import TrainingJobStatus
from etude.loop.figures import (
    TRAINING,
    VALIDATION,
    before_and_after,
    first_and_last_epoch,
    is_measured,
)
from etude.loop.versions import best_version, last_version
from etude.loop.warnings import causes_in, shown_cause, warnings_of
from etude.store.journal import Journal
from etude.store.log import EpochLog, histories


def summary_of(history: History) -> dict[str, Any]:
    """The run in numbers, as JSON.

    `before` and `after` are the validations before training and after it, on the same examples; None
    where there was none. `first_epoch` and `last_epoch` are what the episodes of training got, which are
    sampled before the epoch's update; `last_epoch` is None where there is one epoch. Each is as
    `etude.loop.figures.figure_of` makes it and says on what it was measured, with which version.
    `is_measured` says whether the last weights were measured after they were trained; `best_version` is
    the best of those that were, None where none was. `warnings` are sentences.
    """
    best, last = best_version(history), last_version(history)
    before, after = before_and_after(history)
    first_epoch, last_epoch = first_and_last_epoch(history)
    return {
        "run_id": history.run_id,
        "epochs_trained": len(history.trained),
        "epochs_skipped": len(history.skipped),
        "skip_reasons": sorted({entry.skipped for entry in history.skipped if entry.skipped is not None}),
        "measured_on": VALIDATION if history.validations else TRAINING,
        "before": before,
        "after": after,
        "first_epoch": first_epoch,
        "last_epoch": last_epoch,
        "is_measured": is_measured(history),
        "best_version": None if best is None else best.model_dump(mode="json"),
        "last_version": None if last is None else last.model_dump(mode="json"),
        "warnings": warnings_of(history),
    }


def summary_in(journal: Journal, run_id: str) -> dict[str, Any]:
    """The run that a journal is of, in numbers: `summary_of`, or of several targets `summary_of_targets`."""
    targets = histories(journal, run_id)
    return summary_of_targets(run_id, targets) if targets else summary_of(EpochLog(journal).history(run_id))


def summary_of_targets(run_id: str, histories: Mapping[str, History]) -> dict[str, Any]:
    """A run of several targets in numbers, as JSON: each one's `summary_of` under `targets`.

    An epoch counts as trained when any of them was trained in it. Figures and versions are each target's
    own.
    """
    trained = {entry.epoch for history in histories.values() for entry in history.trained}
    skipped = {entry.epoch for history in histories.values() for entry in history.epochs} - trained
    reasons = {entry.skipped for history in histories.values() for entry in history.skipped if entry.skipped}
    validated = any(history.validations for history in histories.values())
    return {
        "run_id": run_id,
        "epochs_trained": len(trained),
        "epochs_skipped": len(skipped),
        "skip_reasons": sorted(reasons),
        "measured_on": VALIDATION if validated else TRAINING,
        **dict.fromkeys(("before", "after", "first_epoch", "last_epoch", "best_version", "last_version")),
        "is_measured": all(is_measured(history) for history in histories.values()),
        "warnings": [
            f"{name}: {text}" for name, history in histories.items() for text in warnings_of(history)
        ],
        "targets": {name: summary_of(history) for name, history in histories.items()},
    }


def require_trained(histories: Sequence[History]) -> list[TrainingJobStatus]:
    """The statuses of all jobs, by epoch. Raises TrainingError when there were none."""
    trained = sorted(
        (entry for history in histories for entry in history.trained), key=lambda entry: entry.epoch
    )
    if not trained:
        reasons = {reason for history in histories for reason in summary_of(history)["skip_reasons"]}
        epochs = max((len(history.epochs) for history in histories), default=0)
        causes = causes_in([entry for history in histories for entry in history.epochs])
        shown = "".join(f"\n  {shown_cause(one)} (first in {one['episode']})" for one in causes)
        raise TrainingError(
            f"the run trained on nothing in {epochs} epochs. {' | '.join(sorted(reasons))}{shown}"
        )
    return [entry.status for entry in trained if entry.status is not None]


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
