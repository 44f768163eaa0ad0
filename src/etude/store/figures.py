"""The figures of a run from its history alone: what was measured with which version, the summary, words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.core.evaluation import without_numbers
from etude.core.history import Entry, EpochEntry, History, ValidationEntry, WarmUpEntry
from etude.core.job import ModelVersion
from etude.core.stats import Estimate, shown_mean


def shown_reward(metrics: Mapping[str, Any]) -> str:
    """A reward with its interval."""
    reward, low, high = (metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high"))
    if reward is None:
        return "none"
    return shown_mean(reward, low, high, n=metrics.get("num_scored", metrics.get("n")))


def shown_figure(figure: Mapping[str, Any]) -> str:
    """A reward with its interval and how many rewards there are (`etude.store.figures.figure_of`)."""
    if figure["avg_reward"] is None:
        return "none  n=0"
    return shown_reward(figure) + ("" if figure["n"] is None else f"  n={figure['n']}")


def shown_score(score: Mapping[str, Any] | None) -> str:
    """The mean of an evaluator with its interval and `n`."""
    if score is None or score["mean"] is None:
        return "none"
    return f"{shown_mean(score['mean'], score['low'], score['high'], n=score['n'])}  n={score['n']}"


def shown_best(metrics: Mapping[str, Any]) -> str:
    """The best reward and its share, with a comma before it; nothing where there was no reward."""
    from etude.core.distribution import Distribution  # Only here: commands load this to show their help.

    found = Distribution.among(metrics)
    return "" if found is None else f", {found}"


def shown_difference(difference: Estimate) -> str:
    """By how much one run differs from another on examples that both have."""
    shown = shown_mean(difference.mean, difference.low, difference.high, sign="+")
    return f"{shown} on {difference.n} common examples"


VALIDATION = "validation"
TRAINING = "training episodes"


def figure_of(entry: Entry) -> dict[str, Any]:
    """The figures of an epoch's episodes or of a validation, as JSON.

    `measured` says in words on what, `version` the number of the weights (None where the backend does
    not tell), `n` how many rewards there are; `avg_reward` lies between `reward_low` and `reward_high`,
    and `evaluators` has the same for each evaluator. `distribution` is an `etude.core.stats`'s.
    """
    metrics = entry.metrics
    rewards = {key: metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high")}
    return {
        "measured": measured(entry),
        "epoch": entry.epoch,
        "version": version_of(entry),
        "n": metrics.get("num_scored", metrics.get("num_examples")),
        **rewards,
        "distribution": metrics.get("distribution"),
        "evaluators": metrics.get("evaluators") or {},
    }


def measured(entry: Entry) -> str:
    """On what the figures of an entry were measured, and with which version."""
    version = version_of(entry)
    if isinstance(entry, ValidationEntry):
        return f"validation examples, {_when(entry)}" + ("" if version is None else f" (v{version})")
    whence = "" if version is None else f", sampled from v{version}"
    return f"training episodes of epoch {entry.epoch}{whence}"


def name_of(entry: Entry) -> str:
    """An epoch or a validation in a few words."""
    return f"validation {_when(entry)}" if isinstance(entry, ValidationEntry) else f"epoch {entry.epoch}"


def short_name(entry: Entry) -> str:
    """The same with the version that it is a figure of."""
    version = version_of(entry)
    return name_of(entry) + ("" if version is None else f" (v{version})")


def _when(entry: ValidationEntry) -> str:
    if entry.epoch:
        return f"after epoch {entry.epoch}"
    return "after the warm-up, before training" if version_of(entry) else "before training"


def version_of(entry: Entry) -> int | None:
    """The number of the version that an entry's figures are of."""
    version = entry.version if isinstance(entry, ValidationEntry) else entry.sampled_from
    return None if version is None else version.number


def with_rewards(entries: Sequence[Entry]) -> list[Entry]:
    """The entries in which there was a reward."""
    return [entry for entry in entries if entry.metrics.get("avg_reward") is not None]


def is_measured(history: History) -> bool:
    """Whether the last trained weights were measured after they were trained; True without any."""
    trained = history.trained
    return not trained or any(
        entry.epoch >= trained[-1].epoch and entry.metrics.get("avg_reward") is not None
        for entry in history.validations
    )


def failed_counts(metrics: Mapping[str, Any]) -> tuple[int, int]:
    """How many episodes failed, and how many scores of episodes that did not."""
    failures: Mapping[str, int] = metrics.get("failures") or {}
    scores = sum(count for kind, count in failures.items() if kind.startswith("score:"))
    return sum(failures.values()) - scores, scores


def drift_of(history: History) -> Counter[str]:
    """Branches of all epochs that began because a template wrote something differently, by what that was."""
    return sum((Counter(entry.metrics.get("drift") or {}) for entry in history.epochs), Counter[str]())


def measured_versions(history: History) -> list[tuple[ModelVersion, float]]:
    """Versions and their rewards, oldest first.

    By validation where there was any, else by the rewards of the episodes sampled from the version.
    """
    if history.validations:
        rewards = [(entry.version, entry.metrics.get("avg_reward")) for entry in history.measured]
    else:
        rewards = [(entry.sampled_from, entry.metrics.get("avg_reward")) for entry in history.epochs]
    return [
        (version, float(reward)) for version, reward in rewards if version is not None and reward is not None
    ]


def last_version(history: History) -> ModelVersion | None:
    """The weights after the last epoch, or that the model went back to since; before the first those of the
    warm-up, if there was one."""
    versions = (
        entry.back_to or (entry.version if isinstance(entry, EpochEntry) else None)
        for entry in reversed(history.entries)
    )
    return next((version for version in versions if version is not None), history.start)


def best_version(history: History) -> ModelVersion | None:
    """The version with the highest validation reward, the latest of equals; the base model may be it.

    None where no version was measured after it was trained: nobody knows which is best then.
    """
    measured = measured_versions(history) if history.validations else []
    start = 0 if history.start is None else history.start.number
    if all(version.number <= start for version, _ in measured):
        return None
    return max(measured, key=lambda pair: (pair[1], pair[0].number))[0]


def versions_to_keep(history: History, count: int) -> list[ModelVersion]:
    """The `count` best versions, the last one, from which a run is resumed, and that of the warm-up, which
    training began with; oldest first."""
    ranked = sorted(measured_versions(history), key=lambda pair: (-pair[1], -pair[0].number))
    best = list({version.number: version for version, _ in ranked}.values())[:count]
    last = last_version(history)
    kept = [*best, *(version for version in (last, history.start) if version is not None)]
    return sorted({version.number: version for version in kept}.values(), key=lambda each: each.number)


def versions_made(history: History) -> list[int]:
    """The numbers of the versions that led to the present one, oldest first: that of the warm-up, and those
    that epochs made, but for those that the model went back from."""
    made = [] if history.start is None else [history.start.number]
    for entry in history.entries:
        if isinstance(entry, EpochEntry) and entry.status is not None and entry.version is not None:
            made.append(entry.version.number)
        if entry.back_to is not None:
            made = [number for number in made if number <= entry.back_to.number]
    return made


def version_to_go_back_to(history: History) -> ModelVersion | None:
    """The best of the versions that were measured, the latest of equals; None where it is the present one.

    By validation where there was any, else by the rewards of the episodes sampled from the version.
    """
    measured = measured_versions(history)
    present = last_version(history)
    if not measured or present is None:
        return None
    best = max(measured, key=lambda pair: (pair[1], pair[0].number))[0]
    return None if best.number == present.number else best


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
    kinds: tuple[Sequence[Entry], ...] = (history.epochs, history.validations)
    texts = []
    for entries in kinds:
        held: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for entry in entries:
            for event in entry.alarms:
                if event.alarm != FAILURES:
                    held.setdefault(event.key, []).append((name_of(entry), event.text))
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
