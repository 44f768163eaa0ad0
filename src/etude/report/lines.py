"""Plain lines: what is happening, for a pipe or a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from etude.core.episode import EpisodeRecord
from etude.report.state import RunState, of_target, shown_reward, shown_time
from etude.store.figures import failed_counts


class LineProgress(RunState):
    """A line for each thing that matters, and a sign of life while episodes run."""

    def __init__(
        self,
        stream: TextIO | None = None,
        seconds_between_signs: float = 10.0,
        *,
        stamped: bool = False,
        **kwargs: Any,
    ) -> None:
        """`stamped` lines begin with date and time."""
        super().__init__(**kwargs)
        self._stream = sys.stdout if stream is None else stream
        self._between = seconds_between_signs
        self._stamped = stamped
        self._last_sign = self.clock()

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.flush()

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        """Name the run and what it works with."""
        super().run_started(run_id, num_epochs, facts)
        told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
        self._say(f"run {run_id}: {num_epochs} epochs ({told})")

    def phase(self, name: str, total: int | None = None) -> None:
        """Name phases that run episodes."""
        super().phase(name, total)
        if total:
            self._say(f"{self._where()}{name} {total} episodes")

    def episode_finished(self, episode: EpisodeRecord) -> None:
        """Give a sign of life now and then."""
        super().episode_finished(episode)
        if self.clock() - self._last_sign >= self._between:
            reward = self.reward_so_far
            so_far = "" if reward is None else f", reward so far {reward:.3f}"
            failed = f", {self.failures} failed" if self.failures else ""
            done = f"{self.episodes}/{self.phase_total}" if self.phase_total else str(self.episodes)
            speed = f"{self.tokens_per_second:,.0f} tokens/s"
            self._say(f"{self._where()}{done} episodes{so_far}{failed}, {speed}")

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """One line for the epoch."""
        super().trained(epoch, metrics)
        failed, unscored = failed_counts(metrics)
        retries = (metrics.get("calls") or {}).get("retries")
        drifted = f", {metrics['drifted']} branches by drift" if metrics.get("drifted") else ""
        self._say(
            f"epoch {epoch}/{self.num_epochs}{of_target(metrics)}: reward {shown_reward(metrics)}, "
            f"{metrics.get('filtered_trajectories', 0)} trajectories"
            + (f", {failed} failed" if failed else "")
            + (f", {unscored} scores failed" if unscored else "")
            + (f", {retries} retries" if retries else "")
            + drifted
            + f", {shown_time(self.elapsed)} elapsed"
        )

    def skipped(self, epoch: int, reason: str) -> None:
        """One line for the skip."""
        super().skipped(epoch, reason)
        self._say(f"epoch {epoch}/{self.num_epochs} skipped: {self.skip_reason}")

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """One line for the validation."""
        super().validated(epoch, metrics)
        when = "before training" if epoch == 0 else f"after epoch {epoch}"
        told = f"reward {shown_reward(metrics)}, n={metrics.get('num_examples')}"
        self._say(f"validation {when}{of_target(metrics)}: {told}")

    def message(self, text: str, *, warning: bool = False) -> None:
        """The text on a line."""
        self._say(f"warning: {text}" if warning else text)

    def _where(self) -> str:
        return "" if self.epoch is None else f"epoch {self.epoch}/{self.num_epochs}: "

    def _say(self, line: str) -> None:
        self._last_sign = self.clock()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ") if self._stamped else ""
        print(f"{stamp}{line}", file=self._stream, flush=True)
