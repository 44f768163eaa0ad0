"""The metrics files of a run, written anew from its history, so that no line is there twice.

training_metrics.jsonl   every number of every epoch, a line each
reward_history.json      the rewards of the epochs' episodes, and what each evaluator gave
validation_history.json  the same on the validation examples
curriculum_state.json    the curriculum after the last epoch, when there is one
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.core.history import EpochEntry, History
from etude.core.numbers import finite
from etude.store.files import write_atomically

_REWARDS = (
    "avg_reward",
    "min_reward",
    "max_reward",
    "reward_low",
    "reward_high",
    "num_scored",
    "evaluators",
)


def write_metrics_files(history: History, folder: Path) -> None:
    """Write the files; each is whole at any instant. Raises StoreError when one cannot be written."""
    lines = [_line(epoch_line(history.run_id, entry)) for entry in history.epochs]
    write_atomically(folder / "training_metrics.jsonl", "".join(f"{line}\n" for line in lines))
    _write(folder / "reward_history.json", reward_history(history))
    if history.validations:
        _write(folder / "validation_history.json", validation_history(history))
    state = curriculum_state(history)
    if state is not None:
        _write(folder / "curriculum_state.json", state)


def epoch_line(run_id: str, entry: EpochEntry) -> dict[str, Any]:
    """A line of training_metrics.jsonl."""
    head = {"epoch": entry.epoch, "timestamp": entry.timestamp, "run_id": run_id}
    line = {**head, **entry.metrics, **head}  # A trainer may log an epoch of its own counting.
    if entry.skipped is not None:
        line["skipped"] = entry.skipped
    if entry.resting is not None:
        line["resting"] = entry.resting
    if _has_curriculum(entry):
        line["curriculum_state"] = entry.curriculum_state
    return line


def reward_history(history: History) -> list[dict[str, Any]]:
    """The content of reward_history.json."""
    return [
        {
            "epoch": entry.epoch,
            "timestamp": entry.timestamp,
            **_picked(entry.metrics, (*_REWARDS, "num_trajectories")),
        }
        for entry in history.epochs
        if entry.resting is None
    ]


def validation_history(history: History) -> list[dict[str, Any]]:
    """The content of validation_history.json; `epoch` counts the epochs that were trained before it."""
    return [
        {
            "epoch": entry.epoch,
            "timestamp": entry.timestamp,
            **_picked(entry.metrics, (*_REWARDS, "num_examples", "num_unscored")),
        }
        for entry in history.validations
    ]


def curriculum_state(history: History) -> dict[str, Any] | None:
    """The content of curriculum_state.json; None when there is no curriculum."""
    if not history.epochs or not _has_curriculum(history.epochs[-1]):
        return None
    return history.epochs[-1].curriculum_state


def _has_curriculum(entry: EpochEntry) -> bool:
    config = (entry.curriculum_state or {}).get("config") or {}
    return bool(config.get("enabled"))


def _picked(metrics: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: metrics.get(key) for key in keys}


def _line(value: Any) -> str:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def _write(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
