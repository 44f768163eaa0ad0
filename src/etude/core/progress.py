"""The events of a run, for whoever is watching it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem


class Progress:
    """Receives the events of a run, in order; subclasses override what they show.

    Methods return at once and never raise. A context manager, for displays that have to be taken down.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        """A run begins or is resumed; `facts` says on how many examples, with what, and where."""

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """An epoch begins; here and below, `epoch` counts from 1."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins: `validating`, `collecting`, `training`, …; `total` episodes are expected in it."""

    def episode_finished(self, episode: EpisodeRecord) -> None:
        """An episode ended, well or in failure."""

    def scored(self, item: EvalOutputItem) -> None:
        """An episode got its reward, or the reason why there is none."""

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """An epoch was trained on; its metrics."""

    def skipped(self, epoch: int, reason: str) -> None:
        """An epoch had nothing to train on."""

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """The weights after `epoch` (0: before training) were evaluated on the validation examples."""

    def message(self, text: str, *, warning: bool = False) -> None:
        """Something that a person should read."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run is over."""


class Silent(Progress):
    """A Progress that shows nothing."""
