"""The events of a run, counted on their way to its display."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem
from etude.core.interfaces import Progress
from etude.store.status import Totals


class RunCounts(Progress):
    """Counts the events of a run, and hands each on to the display."""

    def __init__(self, display: Progress) -> None:
        self.display = display
        # These are nothing to count.
        self.message = display.message  # type: ignore[method-assign]
        self.alarm = display.alarm  # type: ignore[method-assign]
        self.finished = display.finished  # type: ignore[method-assign]
        self.spent = display.spent  # type: ignore[method-assign]
        self.epoch: int | None = None
        self.num_epochs = 0
        self.phase_name, self.expected = "starting", None
        self.phase_since = time.monotonic()
        self.episodes = 0
        """That ended in this phase."""
        self.rewards: dict[str, float] = {}
        """The mean of the last epoch's episodes, by target; under "" where one model is trained."""
        self.validation: dict[str, float] = {}
        self._totals = dict.fromkeys(Totals.model_fields, 0)
        self._score_sum = 0.0

    expected: int | None
    """Episodes of this phase."""

    @property
    def totals(self) -> Totals:
        """The counts so far."""
        return Totals.model_validate(self._totals | {"score_sum": self._score_sum})

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        self.num_epochs = num_epochs
        self.display.run_started(run_id, num_epochs, facts)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        self.epoch, self.num_epochs = epoch, num_epochs
        self.display.epoch_started(epoch, num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        self.phase_name, self.expected = name, total
        self.phase_since = time.monotonic()
        self.episodes = 0
        self.display.phase(name, total)

    def episode_finished(self, episode: EpisodeRecord) -> None:
        self.episodes += 1
        totals = self._totals
        totals["finished"] += 1
        totals["failed"] += episode.failure is not None
        totals["calls"] += len(episode.calls)
        for call in episode.calls:
            if call.completion is not None:
                totals["prompt_tokens"] += call.completion.usage.prompt_tokens
                totals["completion_tokens"] += call.completion.usage.completion_tokens
        self.display.episode_finished(episode)

    def scored(self, item: EvalOutputItem) -> None:
        if item.is_scored and item.score is not None:
            self._totals["scores"] += 1
            self._score_sum += item.score
        self.display.scored(item)

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        self._totals["trained"] += 1
        _note_reward(self.rewards, metrics)
        self.display.trained(epoch, metrics)

    def skipped(self, epoch: int, reason: str) -> None:
        self._totals["skipped"] += 1
        self.display.skipped(epoch, reason)

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        _note_reward(self.validation, metrics)
        self.display.validated(epoch, metrics)


def _note_reward(rewards: dict[str, float], metrics: Mapping[str, Any]) -> None:
    if metrics.get("avg_reward") is not None:
        rewards[str(metrics.get("target") or "")] = float(metrics["avg_reward"])
