"""Listing the runs of a folder without opening them for writing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from etude.store.lock import locked_by
from etude.store.run_folder import DATABASE, LOCK


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run folder, seen from outside."""

    name: str
    path: Path
    changed: float
    """When the journal was last written; Unix seconds."""
    in_use_by: int | None
    """The process that has the run open, or None."""


def list_runs(root: Path | str) -> list[RunSummary]:
    """The runs in `root`, the one changed last first. A folder that is not there has no runs."""
    runs = [_summary(database.parent) for database in Path(root).glob(f"*/{DATABASE}")]
    return sorted(runs, key=lambda run: (-run.changed, run.name))


def _summary(path: Path) -> RunSummary:
    written = [path / DATABASE, path / f"{DATABASE}-wal"]
    # An empty write-ahead log tells nothing: whoever only reads the run leaves one behind.
    states = [file.stat() for file in written if file.exists()]
    changed = max((state.st_mtime for state in states if state.st_size), default=states[0].st_mtime)
    return RunSummary(path.name, path, changed, locked_by(path / LOCK))
