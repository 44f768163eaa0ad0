"""The record of one model's training: its history, journalled, reported and told."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etude.core.history import EpochEntry, History, ValidationEntry
from etude.epochs.log import EpochLog
from etude.epochs.metrics import finite
from etude.runtime import Runtime


class Record:
    """Keeps what a trainer has done. In a run of several targets, each has one under its own name."""

    def __init__(self, runtime: Runtime, target: str | None) -> None:
        self.log = EpochLog(runtime.run.journal, target)
        self.history: History = self.log.history(runtime.run.name)
        self.target = target
        self._runtime = runtime

    def is_done(self, epoch: int) -> bool:
        """Whether the epoch is recorded."""
        return any(entry.epoch == epoch for entry in self.history.epochs)

    def is_validated(self, epoch: int) -> bool:
        """Whether the validation is recorded."""
        return any(entry.epoch == epoch for entry in self.history.validations)

    async def add_epoch(self, epoch: int, metrics: dict[str, Any], **outcome: Any) -> EpochEntry:
        """Record an epoch; `outcome` is the other fields of its entry."""
        entry = EpochEntry(epoch=epoch, timestamp=_now(), metrics=finite(metrics), **outcome)
        await self.log.add_epoch(entry)
        self.history = self.history.with_epoch(entry)
        return entry

    async def add_validation(self, epoch: int, metrics: dict[str, Any], **outcome: Any) -> ValidationEntry:
        """Record a validation; `outcome` is the other fields of its entry."""
        entry = ValidationEntry(epoch=epoch, timestamp=_now(), metrics=finite(metrics), **outcome)
        await self.log.add_validation(entry)
        self.history = self.history.with_validation(entry)
        return entry

    def report(self, *, output_dir: str | None = None, final: bool = False) -> None:
        """Write the metrics files: into the run folder (a target: into its own part), or `output_dir`."""
        if self._runtime.report is None:
            return
        folder = self._runtime.run.path if output_dir is None else Path(output_dir)
        if self.target is not None:
            folder = folder / "targets" / self.target
            folder.mkdir(parents=True, exist_ok=True)
        self._runtime.report(self.history, folder, final)

    def with_name(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics with the target's name under `target`, where there are several."""
        return metrics if self.target is None else {"target": self.target, **metrics}

    def by_name(self, text: str) -> str:
        """The text with the target's name before it, where there are several."""
        return text if self.target is None else f"{self.target}: {text}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
