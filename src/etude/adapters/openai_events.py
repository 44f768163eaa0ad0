"""The events of jobs, kept in a file of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.fine_tuning import FineTuningJobEvent


class JobLog:
    """Appends facts about jobs to a file, one JSON object a line; each event of the API once."""

    def __init__(self, path: Path | None) -> None:
        """None keeps nothing."""
        self._path = path
        self._seen: set[str] | None = None

    def add(self, job: str, facts: Mapping[str, Any]) -> None:
        """Append facts about a job."""
        if self._path is not None:
            append_line(self._path, {"run_id": job, **facts})

    def add_events(self, job: str, events: Sequence[FineTuningJobEvent]) -> None:
        """Append the events that are not in the file yet, also not from an earlier process."""
        if self._path is None:
            return
        if self._seen is None:
            self._seen = _event_ids(self._path)
        for event in events:
            if event.id in self._seen:
                continue
            self._seen.add(event.id)
            facts = event.model_dump(mode="json", include={"level", "message", "type", "data", "created_at"})
            self.add(job, {"event": event.id, **{key: value for key, value in facts.items() if value}})


def append_line(path: Path, facts: Mapping[str, Any]) -> None:
    """Append a JSON object to a file, whose folder is made when it is not there.

    It gets a line of its own, also after half a line that a killed process left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        is_cut = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if is_cut else b"") + json.dumps(facts).encode() + b"\n")


def metrics_of(events: Sequence[FineTuningJobEvent]) -> dict[str, float]:
    """The numbers that the latest of the events tells; the events are oldest first."""
    for event in reversed(events):
        if isinstance(event.data, Mapping) and event.type == "metrics":
            return {
                str(key): value
                for key, value in event.data.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
    return {}


def progress_of(metrics: Mapping[str, float]) -> float | None:
    """Percent done, where the events say `step` and `total_steps`."""
    step, total = metrics.get("step"), metrics.get("total_steps")
    return min(100.0, 100.0 * step / total) if step is not None and total else None


def _event_ids(path: Path) -> set[str]:
    if not path.exists():
        return set()
    found: set[str] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.add(json.loads(line).get("event"))
        except (ValueError, AttributeError):
            continue  # Half a line.
    return found
