"""The log of a run's training jobs, in a file of the run."""

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

    @classmethod
    def of(cls, backend: str, folder: str | Path) -> JobLog:
        """The log of a backend's jobs in a folder."""
        return cls(Path(folder) / f"{backend}_jobs.jsonl")

    def add(self, job: str, facts: Mapping[str, Any]) -> None:
        """Append facts about a job."""
        if self._path is not None:
            _append_line(self._path, {"run_id": job, **facts})

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


def _append_line(path: Path, facts: Mapping[str, Any]) -> None:
    """Append a JSON object to a file, whose folder is made when it is not there.

    It gets a line of its own, also after half a line that a killed process left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        is_cut = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if is_cut else b"") + json.dumps(facts).encode() + b"\n")


def _event_ids(path: Path) -> set[str]:
    if not path.exists():
        return set()
    ids: set[str] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            ids.add(json.loads(line).get("event"))
        except (ValueError, AttributeError):
            continue  # Half a line.
    return ids
