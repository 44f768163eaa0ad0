"""What was measured, on what, with which version: the figures of validations and of training episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from etude.core.history import EpochEntry, History, ValidationEntry

Entry: TypeAlias = EpochEntry | ValidationEntry

VALIDATION = "validation"
TRAINING = "training episodes"


def figure_of(entry: Entry) -> dict[str, Any]:
    """The figures of an epoch's episodes or of a validation, as JSON.

    `measured` says in words on what, `version` the number of the weights (None where the backend does
    not tell), `n` how many rewards there are; `avg_reward` lies between `reward_low` and `reward_high`,
    and `evaluators` has the same for each evaluator.
    """
    metrics = entry.metrics
    rewards = {key: metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high")}
    return {
        "measured": measured(entry),
        "epoch": entry.epoch,
        "version": version_of(entry),
        "n": metrics.get("num_scored", metrics.get("num_examples")),
        **rewards,
        "evaluators": metrics.get("evaluators") or {},
    }


def measured(entry: Entry) -> str:
    """On what the figures of an entry were measured, and with which version."""
    version = version_of(entry)
    if isinstance(entry, ValidationEntry):
        when = "before training" if entry.epoch == 0 else f"after epoch {entry.epoch}"
        return f"validation examples, {when}" + ("" if version is None else f" (v{version})")
    whence = "" if version is None else f", sampled from v{version}"
    return f"training episodes of epoch {entry.epoch}{whence}"


def short_name(entry: Entry) -> str:
    """The same in a few words, for a table."""
    version = version_of(entry)
    if isinstance(entry, ValidationEntry):
        name = "validation before" if entry.epoch == 0 else f"validation {entry.epoch}"
    else:
        name = f"training epoch {entry.epoch}"
    return name + ("" if version is None else f" (v{version})")


def version_of(entry: Entry) -> int | None:
    """The number of the version that an entry's figures are of."""
    version = entry.version if isinstance(entry, ValidationEntry) else entry.sampled_from
    return None if version is None else version.number


def with_rewards(entries: Sequence[Entry]) -> list[Entry]:
    """The entries in which there was a reward."""
    return [entry for entry in entries if entry.metrics.get("avg_reward") is not None]


def before_and_after(history: History) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The figures of the validation before training and of the last one after it; None without."""
    before = [entry for entry in history.validations if entry.epoch == 0]
    after = [entry for entry in history.validations if entry.epoch > 0]
    return figure_of(before[0]) if before else None, figure_of(after[-1]) if after else None


def first_and_last_epoch(history: History) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The figures of the first and the last epoch's episodes; the last is None where they are one."""
    entries = [entry for entry in history.epochs if entry.resting is None]
    first = figure_of(entries[0]) if entries else None
    return first, figure_of(entries[-1]) if len(entries) > 1 else None


def is_measured(history: History) -> bool:
    """Whether the last trained weights were measured after they were trained; True without any."""
    trained = history.trained
    return not trained or any(
        entry.epoch >= trained[-1].epoch and entry.metrics.get("avg_reward") is not None
        for entry in history.validations
    )
