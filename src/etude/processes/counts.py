"""The counts of a run's events, for its status and its displays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem
from etude.core.interfaces import Progress
from etude.engines.ledger import format_usd
from etude.store.status import Totals


class ProgressSums(Progress):
    """The sums of a run's events so far. Displays are subclasses that show them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, display: Progress | None = None) -> None:
        """Pass each event on to `display`."""
        self.clock = clock
        self.started = clock()
        self.run_id = ""
        self.epoch: int | None = None
        """Counts from 1; None before the first epoch."""
        self.num_epochs = 0
        ProgressSums.phase(self, "starting")
        self.display = display  # After the first phase, which is no event of a run.
        self._last_reward: float | None = None
        """The average reward of the last epoch."""
        self.spending = ""
        """The amount spent, if the run has a budget or costs money."""
        self.totals = Totals()

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        self.run_id, self.num_epochs = run_id, num_epochs
        super().run_started(run_id, num_epochs, facts)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        self.epoch, self.num_epochs = epoch, num_epochs
        super().epoch_started(epoch, num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        self.phase_name, self.phase_total = name, total
        self.phase_started = self.clock()
        self.episodes = self.failures = self.tokens = 0
        self.scores: list[float] = []
        super().phase(name, total)

    def episode_finished(self, episode: EpisodeRecord) -> None:
        self.episodes += 1
        self.failures += episode.failure is not None
        self.tokens += episode.usage.completion_tokens
        totals = self.totals
        totals.finished += 1
        totals.failed += episode.failure is not None
        totals.calls += len(episode.calls)
        totals.completion_tokens += episode.usage.completion_tokens
        super().episode_finished(episode)

    def scored(self, item: EvalOutputItem) -> None:
        if item.is_scored and item.score is not None:
            self.scores.append(item.score)
        super().scored(item)

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        self._last_reward = metrics.get("avg_reward")
        super().trained(epoch, metrics)

    def spent(self, figures: Mapping[str, Any]) -> None:
        self.spending = shown_spending(figures)
        super().spent(figures)

    @property
    def elapsed(self) -> float:
        """Seconds since the display was made."""
        return self.clock() - self.started

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of the phase's finished episodes, per second of the phase."""
        return self.tokens / max(self.clock() - self.phase_started, 1e-6)

    @property
    def reward_so_far(self) -> float | None:
        """The average of the phase's scores, or else of the last epoch's episodes."""
        return sum(self.scores) / len(self.scores) if self.scores else self._last_reward


def shown_spending(figures: Mapping[str, Any]) -> str:
    """Return the money spent and the used part of each limit; empty without either."""
    limits = [
        f"{key.removeprefix('budget.')} {_format_amount(used)} of {_format_amount(most)}"
        for key, (used, most) in figures["limits"].items()
    ]
    costs = figures["usd"] > 0 and "budget.usd" not in figures["limits"]
    return ", ".join([format_usd(figures["usd"])] * costs + limits)


def _format_amount(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.4g}"
