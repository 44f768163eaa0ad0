"""The summary of a run and its warnings, as pure functions of its history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.core.evaluation import without_numbers
from etude.core.history import Entry, History, WarmUpEntry
from etude.store.figures import (
    TRAINING,
    VALIDATION,
    best_version,
    figure_of,
    is_measured,
    last_version,
    name_of,
    with_rewards,
)

COLLAPSE, FAILURES = "reward_collapse", "failures"
"""Alarms that are shown in other places too."""


def summary_of(history: History) -> dict[str, Any]:
    """The run in numbers, as JSON.

    `warm_up` is what the model imitated first, None where it did not. `before`, `warm` and `after` are the
    validations of the base model, after the warm-up and after training, on the same examples; None where
    there was none. `first_epoch` and `last_epoch` are what the episodes of training got, which are sampled
    before the epoch's update; `last_epoch` is None where there is one epoch. Each is as
    `etude.store.figures.figure_of` makes it and says on what it was measured, with which version.
    `is_measured` says whether the last weights were measured after they were trained; `best_version` is the
    best of those that were, None where none was. `warnings` are sentences. `stopped` is why an alarm ended
    the run early; None where none did.
    """
    best, last = best_version(history), last_version(history)
    start = None if history.validation(0) is None else figure_of(history.validations[0])
    base = None if history.base is None else figure_of(history.base)
    after = [figure_of(entry) for entry in history.validations if entry.epoch > 0]
    epochs = [figure_of(entry) for entry in history.epochs if entry.resting is None]
    return {
        "run_id": history.run_id,
        "epochs_trained": len(history.trained),
        "epochs_skipped": len(history.skipped),
        "skip_reasons": sorted({entry.skipped for entry in history.skipped if entry.skipped is not None}),
        "measured_on": VALIDATION if history.validations else TRAINING,
        "warm_up": None if history.warm_up is None else warm_up_of(history.warm_up),
        "before": start if history.warm_up is None else base,
        "warm": None if history.warm_up is None else start,
        "after": after[-1] if after else None,
        "first_epoch": epochs[0] if epochs else None,
        "last_epoch": epochs[-1] if len(epochs) > 1 else None,
        "is_measured": is_measured(history),
        "best_version": None if best is None else best.model_dump(mode="json"),
        "last_version": None if last is None else last.model_dump(mode="json"),
        "warnings": warnings_of(history),
        "stopped": stopped_by(history),
    }


def warm_up_of(entry: WarmUpEntry) -> dict[str, Any]:
    """A warm-up in numbers, as JSON; its reward, where that was measured, is of training examples."""
    rewards = {key: entry.metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high")}
    return {
        "steps": entry.steps,
        "seconds": entry.seconds,
        "version": None if entry.version is None else entry.version.number,
        "loss": entry.metrics.get("loss"),
        "n": entry.metrics.get("num_scored"),
        **rewards,
    }


def summary_in(by_target: Mapping[str | None, History], run_id: str) -> dict[str, Any]:
    """The run of some histories in numbers: `summary_of`, or of several targets `summary_of_targets`."""
    targets = {name: history for name, history in by_target.items() if name is not None}
    return summary_of_targets(run_id, targets) if targets else summary_of(by_target[None])


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
        **dict.fromkeys(
            ("before", "warm", "after", "first_epoch", "last_epoch", "best_version", "last_version")
        ),
        "is_measured": all(is_measured(history) for history in histories.values()),
        "warnings": [
            f"{name}: {text}" for name, history in histories.items() for text in warnings_of(history)
        ],
        "stopped": next(
            (f"{name}: {text}" for name, history in histories.items() if (text := stopped_by(history))), None
        ),
        "targets": {name: summary_of(history) for name, history in histories.items()},
    }


def warnings_of(history: History) -> list[str]:
    """The alarms of a run, a sentence each: as they were the last time, and for how many others they held.

    Failures are not among them: their causes are counted and shown by themselves.
    """
    return [text for entries in (history.epochs, history.validations) for text in _warnings(entries)]


def _warnings(entries: Sequence[Entry]) -> list[str]:
    held: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for entry in entries:
        for event in entry.alarms:
            if event.alarm != FAILURES:
                held.setdefault(event.key, []).append((name_of(entry), event.text))
    texts = []
    for sentences in held.values():
        (name, text), more = sentences[-1], len(sentences) - 1
        others = "" if not more else f" (and {more} other)" if more == 1 else f" (and {more} others)"
        texts.append(f"{name}{others}: {text}")
    return texts


def collapse_in(history: History) -> str | None:
    """That a run's reward has collapsed, and not risen again: in validation where there is any, else in the
    training episodes."""
    known = with_rewards(history.validations or history.epochs)
    return (
        next((event.text for event in known[-1].alarms if event.alarm == COLLAPSE), None) if known else None
    )


def stopped_by(history: History) -> str | None:
    """Why an alarm has ended the run early: the run has done nothing since. None where none has."""
    last = max((entry.epoch for entry in history.epochs), default=0)
    texts = (
        f"{name_of(entry)}: {event.text}"
        for entry in history.entries
        if entry.epoch == last
        for event in entry.alarms
        if event.action == "stop"
    )
    return next(texts, None)


def causes_in(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """The causes of all failures in the entries, added up, the most frequent first.

    Each has its `kind`, `reason`, `count`, and the first `episode` that it was met in.
    """
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    for entry in entries:
        for cause in entry.metrics.get("failure_causes") or ():
            counts[cause_key(cause)] += cause["count"]
            first.setdefault(cause_key(cause), cause)
    return [{**first[key], "count": count} for key, count in counts.most_common()]


def show_command(run: Path | str, cause: Mapping[str, Any]) -> str:
    """The command that shows the first episode of a cause."""
    return f"etude episodes show {cause['episode']} --run {run}"


def shown_cause(cause: Mapping[str, Any]) -> str:
    """A cause with its count, in one line."""
    return f"{cause['count']} × {cause['kind']}: {cause['reason']}"


def cause_key(cause: Mapping[str, Any]) -> tuple[str, str]:
    """The same for all failures of one cause."""
    return cause["kind"], without_numbers(cause["reason"])
