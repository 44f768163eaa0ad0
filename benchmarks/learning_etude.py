"""Etude's side of learning.py: `etude.train` on the example's config, as anybody calls it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learning_task import Clock, Course

import etude
from etude.core.interfaces import Progress


class Ends(Progress):
    """Notes when a tenth ends, and writes the model that there is then. An epoch is a step."""

    def __init__(self, clock: Clock, folder: Path) -> None:
        self.clock = clock
        self.folder = folder
        self._run = Path()
        self._latest = 0

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        """The run has a folder."""
        self._run = self.clock.course.folder / "runs" / run_id

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """An epoch begins."""
        self.clock.before(epoch)

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """There is a new version."""
        self._latest += 1
        self._over(epoch)

    def skipped(self, epoch: int, reason: str) -> None:
        """There is none."""
        self._over(epoch)

    def _over(self, epoch: int) -> None:
        if self.clock.after(epoch):
            self.clock.leave_out(self._export)

    def _export(self) -> None:
        # Now, as the run deletes it soon.
        version = etude.load_run(self._run).version(f"v{self._latest}")
        version.export(self.folder / str(len(self.clock.ends)))


def train(course: Course, clock: Clock, folder: Path) -> None:
    """Train, and write the model of each tenth into the folder of its number, from 1 on."""
    etude.train(course.file, overrides=course.overrides, progress=Ends(clock, folder))
