"""Displays of a run's progress, as lines or as JSON."""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from etude.core.data_model import finite
from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem
from etude.core.history import Score, ValidationEntry
from etude.core.interfaces import Progress, ProgressSums
from etude.core.stats import Distribution, shown_seconds
from etude.engines.ledger import format_usd
from etude.store.figures import failed_counts


def target_suffix(metrics: Mapping[str, Any]) -> str:
    """Return the target's name after a space, if there are several targets."""
    return f" {metrics['target']}" if metrics.get("target") else ""


def _best(metrics: Mapping[str, Any]) -> str:
    found = Distribution.from_metrics(metrics)
    return "" if found is None else f", {found}"


_SECONDS_BETWEEN_SIGNS = 10.0


class LineProgress(ProgressSums):
    """A display of lines: one for each important event, and signs of life while episodes run."""

    def __init__(self, stream: TextIO | None = None, *, stamped: bool = False, **kwargs: Any) -> None:
        """`stamped` lines begin with date and time."""
        super().__init__(**kwargs)
        self._stream = stream or sys.stdout
        self._stamped = stamped
        self._last_sign = self.clock()
        self._scores: list[float] = []
        """The scores of the phase."""
        self._reward: float | None = None
        """The average reward of the last epoch."""
        self._spent: list[str] = []
        """The amount spent and the used part of each limit, if there is any."""

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        super().run_started(run_id, num_epochs, facts)
        listed = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
        self._say(f"run {run_id}: {num_epochs} epochs ({listed})")

    def phase(self, name: str, total: int | None = None) -> None:
        super().phase(name, total)
        self._scores.clear()
        if total:
            self._say(f"{self._epoch_prefix()}{name} {total} episodes")

    def episode_finished(self, episode: EpisodeRecord) -> None:
        super().episode_finished(episode)
        if self.clock() - self._last_sign >= _SECONDS_BETWEEN_SIGNS:
            reward = sum(self._scores) / len(self._scores) if self._scores else self._reward
            so_far = "" if reward is None else f", reward so far {reward:.3f}"
            failed = f", {self.failures} failed" if self.failures else ""
            done = f"{self.episodes}/{self.phase_total}" if self.phase_total else str(self.episodes)
            speed = self.tokens / max(self.clock() - self.phase_started, 1e-6)
            facts = ", ".join([f"{done} episodes{so_far}{failed}", f"{speed:,.0f} tokens/s", *self._spent])
            self._say(f"{self._epoch_prefix()}{facts}")

    def scored(self, item: EvalOutputItem) -> None:
        if item.is_scored and item.score is not None:
            self._scores.append(item.score)
        super().scored(item)

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        super().trained(epoch, metrics)
        self._reward = metrics.get("avg_reward")
        failed, unscored = failed_counts(metrics)
        calls = metrics.get("calls") or {}
        counts = {
            "failed": failed,
            "scores failed": unscored,
            "retries": calls.get("retries"),
            "tool calls failed": calls.get("tool_failed"),
            "branches by drift": metrics.get("drifted"),
        }
        cut_off = metrics.get("cut_off_share")
        share = f"{cut_off:.0%}" if cut_off and cut_off >= 0.01 else "fewer than 1%"
        facts = [
            f"reward {Score.from_metrics(metrics)}{_best(metrics)}",
            f"{metrics.get('filtered_trajectories', 0)} trajectories",
            *([f"{share} of answers cut off"] if cut_off else []),
            *(f"{count} {name}" for name, count in counts.items() if count),
            f"{shown_seconds(self.clock() - self.started)} elapsed",
            *self._spent,
        ]
        self._say(f"epoch {epoch}/{self.num_epochs}{target_suffix(metrics)}: {', '.join(facts)}")

    def skipped(self, epoch: int, reason: str) -> None:
        super().skipped(epoch, reason)
        self._say(f"epoch {epoch}/{self.num_epochs} skipped: {reason}")

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        super().validated(epoch, metrics)
        entry, n = ValidationEntry(epoch=epoch, metrics=dict(metrics)), metrics.get("num_examples")
        self._say(f"{entry}{target_suffix(metrics)}: reward {entry.reward}, n={n}{_best(metrics)}")

    def spent(self, figures: Mapping[str, Any]) -> None:
        costs = figures["usd"] > 0 and "budget.usd" not in figures["limits"]
        self._spent = [format_usd(figures["usd"])] * costs
        for key, amounts in figures["limits"].items():
            used, most = (f"{each:,.0f}" if each >= 1000 else f"{each:.4g}" for each in amounts)
            self._spent.append(f"{key.removeprefix('budget.')} {used} of {most}")
        super().spent(figures)

    def message(self, text: str, *, warning: bool = False) -> None:
        self._say(f"warning: {text}" if warning else text)

    def _epoch_prefix(self) -> str:
        return "" if self.epoch is None else f"epoch {self.epoch}/{self.num_epochs}: "

    def _say(self, line: str) -> None:
        self._last_sign = self.clock()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ") if self._stamped else ""
        print(f"{stamp}{line}", file=self._stream, flush=True)


class JsonProgress(Progress):
    """A display of JSON lines: an object for each event, with its name under `event`, and its data."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._spent: Mapping[str, Any] = {}

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        self._write("run_started", run_id=run_id, num_epochs=num_epochs, **facts)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        self._write("epoch_started", epoch=epoch, num_epochs=num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        self._write("phase", name=name, total=total)

    def episode_finished(self, episode: EpisodeRecord) -> None:
        failure = None if episode.failure is None else f"{episode.failure.kind}: {episode.failure.reason}"
        facts = {"calls": len(episode.calls), "seconds": round(episode.seconds, 3), "failure": failure}
        self._write("episode_finished", id=episode.id, **facts)

    def scored(self, item: EvalOutputItem) -> None:
        self._write("scored", id=item.id, generation=item.generation, score=item.score, error=item.error)

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        self._write("trained", epoch=epoch, metrics=metrics)

    def skipped(self, epoch: int, reason: str) -> None:
        self._write("skipped", epoch=epoch, reason=reason)

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        self._write("validated", epoch=epoch, metrics=metrics)

    def spent(self, figures: Mapping[str, Any]) -> None:
        if (figures["usd"] or figures["limits"]) and figures != self._spent:
            self._spent = figures
            self._write("spent", **figures)

    def message(self, text: str, *, warning: bool = False) -> None:
        self._write("message", text=text, warning=warning)

    def alarm(self, facts: Mapping[str, Any]) -> None:
        self._write("alarm", **facts)

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._write("finished", **summary)

    def _write(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **finite(facts)}, allow_nan=False), file=self._stream, flush=True)


def progress_for(*, json: bool = False, stream: TextIO | None = None) -> LineProgress | JsonProgress:
    """Return a display of lines or, if `json` is set, of JSON. Outside a terminal, lines have the time."""
    stream = stream or sys.stdout
    return JsonProgress(stream) if json else LineProgress(stream, stamped=not (stream and stream.isatty()))
