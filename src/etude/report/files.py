"""The files of a run, written from its history after every epoch, so that no line is there twice.

training_metrics.jsonl   every number of every epoch, a line each, and the alarms that hold
reward_history.json      the rewards of the epochs' episodes, and what each evaluator gave
validation_history.json  the same on the validation examples
curriculum_state.json    the curriculum after the last epoch, when there is one
reward_plot.png          the rewards, drawn now and then and at the end
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from etude.core.data_model import finite
from etude.core.errors import MissingExtraError
from etude.core.history import Entry, EpochEntry, History
from etude.core.secrets import masked
from etude.report.plot import write_reward_plot
from etude.store.files import write_atomically

E = TypeVar("E", bound=Entry)

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
        self._files: dict[Path, MetricsFiles] = {}

    def __call__(self, history: History, folder: Path, final: bool = False) -> None:
        """Write the files of `history` into `folder`. Raises StoreError when one cannot be written."""
        self._files.setdefault(folder, MetricsFiles(folder)).write(history)
        if final or self._clock() - self._drawn_at >= self._between:
            self._drawn_at = self._clock()
            try:
                write_reward_plot(history, folder / PLOT)
            except MissingExtraError as missing:
                if final:
                    self._tell(f"there is no {PLOT}: {missing}")


class MetricsFiles:
    """The metrics files of one folder. A run may have thousands of epochs: each is encoded once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: dict[tuple[str, int], tuple[Entry, str]] = {}

    def write(self, history: History) -> None:
        """Bring the files up to the history. Raises StoreError when one cannot be written.

        Each is whole at any instant.
        """
        lines = self._encoded("lines", history.epochs, lambda entry: _line(history, entry))
        write_atomically(self._folder / "training_metrics.jsonl", "".join(lines), exact=True)
        trained_on = [entry for entry in history.epochs if entry.resting is None]
        self._write_list("reward_history", trained_on, "num_trajectories")
        if history.validations:
            self._write_list("validation_history", history.validations, "num_examples", "num_unscored")
        if history.epochs and _has_curriculum(history.epochs[-1]):
            state = _json(history.epochs[-1].curriculum_state, indent=2)
            write_atomically(self._folder / "curriculum_state.json", f"{state}\n")

    def _write_list(self, name: str, entries: Iterable[Entry], *more: str) -> None:
        """A JSON file with the rewards of epochs or validations, and `more` of their metrics."""
        items = self._encoded(name, entries, lambda entry: _item(entry, more))
        text = ",\n".join(items)
        write_atomically(self._folder / f"{name}.json", f"[\n{text}\n]\n" if text else "[]\n", exact=True)

    def _encoded(self, name: str, entries: Iterable[E], encode: Callable[[E], str]) -> Iterable[str]:
        """The text of each entry in one of the files."""
        for entry in entries:
            known = self._texts.get((name, entry.epoch))
            # A frozen entry: another one takes its place where something of it changes.
            if known is None or known[0] is not entry:
                known = self._texts[name, entry.epoch] = entry, masked(encode(entry))
            yield known[1]


def _line(history: History, entry: EpochEntry) -> str:
    return f"{_json(_epoch_line(history.run_id, entry))}\n"


def _item(entry: Entry, more: Iterable[str]) -> str:
    """The rewards of an epoch or validation, as an item of a JSON list over several lines."""
    return textwrap.indent(_json(_rewards(entry, more), indent=2), "  ")


def _epoch_line(run_id: str, entry: EpochEntry) -> dict[str, Any]:
    """A line of training_metrics.jsonl."""
    head = {"epoch": entry.epoch, "timestamp": entry.timestamp, "run_id": run_id}
    curriculum = entry.curriculum_state if _has_curriculum(entry) else None
    more = {"skipped": entry.skipped, "resting": entry.resting, "curriculum_state": curriculum}
    line = {**head, **entry.metrics, **head}  # A trainer may log an epoch of its own counting.
    return line | {key: value for key, value in more.items() if value is not None} | _alarms(entry)


def _rewards(entry: Entry, more: Iterable[str]) -> dict[str, Any]:
    """The rewards of an epoch or validation, with `more` of its metrics."""
    metrics = {key: entry.metrics.get(key) for key in (*_REWARDS, *more)}
    return {"epoch": entry.epoch, "timestamp": entry.timestamp, **metrics, **_alarms(entry)}


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
