"""One progress for several targets, that tells of shared episodes once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem
from etude.core.progress import Progress, Silent


class SharedProgress(Silent):
    """Passes on what the targets of a run tell.

    A phase that one target has begun is not begun anew by the next where its episodes are the same ones,
    read back from the journal; the rewards that are told are then those of the target that came first. A
    target that has other episodes too (its builder asks for other plays, or for more of them) begins the
    phase anew with the first of them, so that each episode is counted, and once.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._phase: str | None = None
        self._speaker: str | None = None
        self._totals: dict[str, int | None] = {}
        """By target: the episodes that it expects in the phase."""
        self._told: dict[str, set[tuple[str, int]]] = {}
        """By phase in the journal: the example and generation of each episode that was told of."""
        self._unscored: set[tuple[str, str, int]] = set()
        """The target, example and generation of the episodes whose scores are to be told."""

    def view(self, target: str) -> Progress:
        """The progress that the trainer of one target tells."""
        return _View(self, target)

    def phase_of(self, target: str, name: str, total: int | None) -> None:
        """A target begins a phase."""
        if name != self._phase or self._speaker == target:
            self.phase(name, total)
            self._speaker = target
        self._totals[target] = total

    def episode_of(self, target: str, episode: EpisodeRecord) -> None:
        """An episode of a target ended: told of unless another target has told of it."""
        example, generation = episode.example.id, episode.generation
        told = self._told.setdefault(episode.id.removesuffix(f"/{example}/{generation}"), set())
        if (example, generation) in told:
            return
        if self._speaker != target and self._phase is not None:
            self.progress.phase(self._phase, self._rest_of(target, example, told))
            self._speaker = target
        told.add((example, generation))
        self._unscored.add((target, example, generation))
        self.progress.episode_finished(episode)

    def _rest_of(self, target: str, example: str, told: set[tuple[str, int]]) -> int | None:
        """How many episodes a target has that nobody has told of, where that is known.

        It has those of the others and more, or else it has other examples: then nobody knows yet.
        """
        total = self._totals.get(target)
        if total is None or not told:
            return total
        rest = total - len(told)
        return rest if rest > 0 and any(name == example for name, _ in told) else None

    def scored_by(self, target: str, item: EvalOutputItem) -> None:
        """An episode of a target was scored: told of by the target that told of the episode."""
        place = (target, item.id, item.generation)
        if place in self._unscored:
            self._unscored.remove(place)
            self.progress.scored(item)

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        """See Progress."""
        self.progress.run_started(run_id, num_epochs, facts)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """See Progress."""
        self._phase = self._speaker = None
        self._totals, self._told, self._unscored = {}, {}, set()
        self.progress.epoch_started(epoch, num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase that is nobody's in particular."""
        self._phase, self._speaker = name, None
        self._totals, self._told, self._unscored = {}, {}, set()
        self.progress.phase(name, total)

    def message(self, text: str, *, warning: bool = False) -> None:
        """See Progress."""
        self.progress.message(text, warning=warning)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See Progress."""
        self.progress.finished(summary)


class _View(Silent):
    """What one target tells."""

    def __init__(self, shared: SharedProgress, target: str) -> None:
        self._shared = shared
        self._target = target

    def phase(self, name: str, total: int | None = None) -> None:
        self._shared.phase_of(self._target, name, total)

    def episode_finished(self, episode: EpisodeRecord) -> None:
        self._shared.episode_of(self._target, episode)

    def scored(self, item: EvalOutputItem) -> None:
        self._shared.scored_by(self._target, item)

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        self._shared.progress.trained(epoch, metrics)

    def skipped(self, epoch: int, reason: str) -> None:
        self._shared.progress.skipped(epoch, reason)

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        self._shared.progress.validated(epoch, metrics)

    def message(self, text: str, *, warning: bool = False) -> None:
        self._shared.progress.message(f"{self._target}: {text}", warning=warning)
