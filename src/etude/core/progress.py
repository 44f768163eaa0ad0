"""What a run tells whoever is watching it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem


class Progress(Protocol):
    """Receives the events of a run, in order. Methods return at once and never raise."""

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


class Silent:
    """A Progress that tells nobody. Other implementations override what they show."""

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        """See Progress."""

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """See Progress."""

    def phase(self, name: str, total: int | None = None) -> None:
        """See Progress."""

    def episode_finished(self, episode: EpisodeRecord) -> None:
        """See Progress."""

    def scored(self, item: EvalOutputItem) -> None:
        """See Progress."""

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """See Progress."""

    def skipped(self, epoch: int, reason: str) -> None:
        """See Progress."""

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """See Progress."""

    def message(self, text: str, *, warning: bool = False) -> None:
        """See Progress."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See Progress."""
