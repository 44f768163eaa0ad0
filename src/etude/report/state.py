"""What a progress display knows: the events of a run, summed up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem
from etude.core.progress import Silent
from etude.core.stats import shown_mean

_BLOCKS = "▁▂▃▄▅▆▇█"


class RunState(Silent):
    """Sums up the events of a run. Displays are subclasses that show it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started = clock()
        self.run_id = ""
        self.facts: dict[str, Any] = {}
        self.epoch: int | None = None
        """From 0; None before the first."""
        self.num_epochs = 0
        self.phase_name = "starting"
        self.phase_total: int | None = None
        self._begin_phase()
        self.failures = 0
        """Failed episodes of the whole run, in this process."""
        self.rewards: dict[str, list[float]] = {}
        """Average reward of each epoch's episodes, by target; under "" where one model is trained."""
        self.validations: dict[str, list[Mapping[str, Any]]] = {}
        """By target."""
        self.skips = 0
        self.skip_reason = ""
        """Why the last epoch was skipped, said in full the first time."""
        self._skip_said = ""

    def _begin_phase(self) -> None:
        self.phase_started = self.clock()
        self.episodes = 0
        self.tokens = 0
        self.scores: list[float] = []

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        """Take note of the run."""
        self.run_id, self.num_epochs, self.facts = run_id, num_epochs, dict(facts)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """Take note of the epoch."""
        self.epoch, self.num_epochs = epoch, num_epochs

    def phase(self, name: str, total: int | None = None) -> None:
        """Begin to count anew."""
        self.phase_name, self.phase_total = name, total
        self._begin_phase()

    def episode_finished(self, episode: EpisodeRecord) -> None:
        """Count the episode, its tokens and its failure."""
        self.episodes += 1
        self.failures += episode.failure is not None
        self.tokens += sum(
            call.completion.usage.completion_tokens for call in episode.calls if call.completion is not None
        )

    def scored(self, item: EvalOutputItem) -> None:
        """Take the score into the phase's average."""
        if item.is_scored and item.score is not None:
            self.scores.append(item.score)

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Keep the epoch's average reward."""
        if metrics.get("avg_reward") is not None:
            self.rewards.setdefault(target_of(metrics), []).append(float(metrics["avg_reward"]))

    def skipped(self, epoch: int, reason: str) -> None:
        """Count the skip."""
        self.skips += 1
        self.skip_reason = "as before" if reason == self._skip_said else reason
        self._skip_said = reason

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Keep the validation."""
        self.validations.setdefault(target_of(metrics), []).append(metrics)

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
        if self.scores:
            return sum(self.scores) / len(self.scores)
        return next((rewards[-1] for rewards in self.rewards.values()), None)


def target_of(metrics: Mapping[str, Any]) -> str:
    """Which target the metrics are of; "" where one model is trained."""
    return str(metrics.get("target") or "")


def of_target(metrics: Mapping[str, Any]) -> str:
    """The target's name with a space before it, where there are several; else nothing."""
    return f" {target_of(metrics)}" if target_of(metrics) else ""


def sparkline(values: list[float], width: int = 24) -> str:
    """The last values as blocks, the least lowest; equal values lie in the middle."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high - low < 1e-12:
        return _BLOCKS[len(_BLOCKS) // 2] * len(shown)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in shown)


def shown_reward(metrics: Mapping[str, Any]) -> str:
    """A reward with its interval, as text."""
    reward, low, high = (metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high"))
    return "none" if reward is None else shown_mean(reward, low, high)


def shown_time(seconds: float) -> str:
    """A duration as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
