"""The figures of a run, from its history alone: what was measured, with which version, and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from etude.core.history import Entry, EpochEntry, History, ValidationEntry
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
    and `evaluators` has the same for each evaluator. `distribution` is an `etude.core.distribution`'s.
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
