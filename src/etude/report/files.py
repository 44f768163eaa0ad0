"""The files of a run, written anew from its history after every epoch, so that no line is there twice.

training_metrics.jsonl   every number of every epoch, a line each, and the alarms that hold
reward_history.json      the rewards of the epochs' episodes, and what each evaluator gave
validation_history.json  the same on the validation examples
curriculum_state.json    the curriculum after the last epoch, when there is one
reward_plot.png          the rewards, drawn now and then and at the end
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etude.core.data_model import finite
from etude.core.errors import MissingExtraError
from etude.core.history import Entry, EpochEntry, History
from etude.report.plot import write_reward_plot
from etude.store.files import write_atomically

PLOT = "reward_plot.png"

_REWARDS = ["avg_reward", "min_reward", "max_reward", "reward_low", "reward_high", "num_scored", "evaluators"]


class RunReport:
    """Writes the metrics files each time it is called, and the plot now and then and at the end."""

    def __init__(
        self,
        seconds_between_plots: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Drawing takes about a second of CPU; hence not every time. `tell` is told why there is no plot."""
        self._between = seconds_between_plots
        self._clock = clock
        self._tell = tell
        self._drawn_at = clock()

    def __call__(self, history: History, folder: Path, final: bool = False) -> None:
        """Write the files of `history` into `folder`. Raises StoreError when one cannot be written."""
        write_metrics_files(history, folder)
        if final or self._clock() - self._drawn_at >= self._between:
            self._drawn_at = self._clock()
            try:
                write_reward_plot(history, folder / PLOT)
            except MissingExtraError as missing:
                if final:
                    self._tell(f"there is no {PLOT}: {missing}")


def write_metrics_files(history: History, folder: Path) -> None:
    """Write the files; each is whole at any instant. Raises StoreError when one cannot be written."""
    lines = "".join(f"{_json(_epoch_line(history.run_id, entry))}\n" for entry in history.epochs)
    write_atomically(folder / "training_metrics.jsonl", lines)
    trained_on = [entry for entry in history.epochs if entry.resting is None]
    files: dict[str, Any] = {"reward_history": _rewards(trained_on, "num_trajectories")}
    if history.validations:
        files["validation_history"] = _rewards(history.validations, "num_examples", "num_unscored")
    if history.epochs and _has_curriculum(history.epochs[-1]):
        files["curriculum_state"] = history.epochs[-1].curriculum_state
    for name, content in files.items():
        write_atomically(folder / f"{name}.json", _json(content, indent=2) + "\n")


def _epoch_line(run_id: str, entry: EpochEntry) -> dict[str, Any]:
    """A line of training_metrics.jsonl."""
    head = {"epoch": entry.epoch, "timestamp": entry.timestamp, "run_id": run_id}
    curriculum = entry.curriculum_state if _has_curriculum(entry) else None
    more = {"skipped": entry.skipped, "resting": entry.resting, "curriculum_state": curriculum}
    line = {**head, **entry.metrics, **head}  # A trainer may log an epoch of its own counting.
    return line | {key: value for key, value in more.items() if value is not None} | _alarms(entry)


def _rewards(entries: Sequence[Entry], *more: str) -> list[dict[str, Any]]:
    """The rewards of epochs or validations, with `more` of their metrics."""
    return [
        {"epoch": entry.epoch, "timestamp": entry.timestamp}
        | {key: entry.metrics.get(key) for key in (*_REWARDS, *more)}
        | _alarms(entry)
        for entry in entries
    ]


def _alarms(entry: Entry) -> dict[str, Any]:
    """The alarms that hold for an entry, and the version that was gone back to; nothing where all is well."""
    line: dict[str, Any] = {}
    if entry.alarms:
        line["alarms"] = [event.model_dump(mode="json") for event in entry.alarms]
    if entry.back_to is not None:
        line["back_to"] = entry.back_to.number
    return line


def _has_curriculum(entry: EpochEntry) -> bool:
    return bool(((entry.curriculum_state or {}).get("config") or {}).get("enabled"))


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False)
