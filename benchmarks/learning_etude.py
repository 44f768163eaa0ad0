"""Etude's side of learning.py: `etude.train` on the example's config, as anybody calls it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learning_task import Clock, Course

import etude
from etude.core.interfaces import Progress


class Ends(Progress):
    """Notes when a tenth ends, and which version of the model there is then. An epoch is a step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.versions: list[int] = []
        self._latest = 0

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
            self.versions.append(self._latest)


def train(course: Course, clock: Clock, folder: Path) -> None:
    """Train, and write the model of each tenth into the folder of its number, from 1 on."""
    ends = Ends(clock)
    run = etude.train(course.file, overrides=course.overrides, keep_checkpoints="all", progress=ends)
    for tenth, version in enumerate(ends.versions, 1):
        run.version(f"v{version}").export(folder / str(tenth))
