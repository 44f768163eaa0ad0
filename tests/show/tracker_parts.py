"""Trackers of a test's own: one that keeps what it is given in a file, and can be away."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.show.tracker import RunRecord, State, TrackedRun


class FileTracker:
    """Adds a line for each record."""

    def __init__(self, file: Path, kill_at: str = "") -> None:
        self.file = file
        self.token = ""
        self._kill_at = kill_at
        """`before 3` or `after 3`: this process ends before or after the third line is written."""

    def open(self, run: TrackedRun) -> str:
        if (away := self.file.with_suffix(".away")).exists():
            raise {"": ConnectionError, "exit": SystemExit}[away.read_text()]("nobody is there")
        self.token = run.token
        self._add({"open": run.token, "config": dict(run.config)})
        return ""

    def send(self, record: RunRecord) -> None:
        count = sum("key" in line for line in self.lines()) + 1
        self._die(f"before {count}")
        self._add(
            {
                "key": record.key,
                "number": record.number,
                "step": record.step,
                "token": self.token,
                "metrics": dict(record.metrics),
            }
        )
        self._die(f"after {count}")

    def close(self, state: State) -> None:
        self._add({"close": state})

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def _add(self, line: dict[str, object]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _die(self, place: str) -> None:
        if place == self._kill_at and not (once := self.file.with_suffix(".killed")).exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class FileTrackerConfig(TrackerConfig, name="file"):
    """Lines in a file."""

    file: Path
    kill_at: str = ""

    def destination(self) -> str:
        return self.file.name


@register_tracker(config_type=FileTrackerConfig)
async def file_tracker(config: FileTrackerConfig, builder: Builder) -> AsyncIterator[FileTracker]:
    yield FileTracker(config.file, config.kill_at)


def note(record: RunRecord) -> None:
    """A function as a config names it."""
    with Path("noted.txt").open("a") as file:
        file.write(record.key + "\n")
