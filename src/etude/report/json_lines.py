"""JSON lines: what is happening, for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem
from etude.core.numbers import finite
from etude.core.progress import Progress


class JsonProgress(Progress):
    """One JSON object on a line for each event; its name is under `event`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream

    def __enter__(self) -> JsonProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.flush()

    def run_started(self, run_id: str, num_epochs: int, facts: Mapping[str, Any]) -> None:
        """`run_started` with `run_id`, `num_epochs` and the facts."""
        self._write("run_started", run_id=run_id, num_epochs=num_epochs, **facts)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """`epoch_started` with `epoch` from 1."""
        self._write("epoch_started", epoch=epoch, num_epochs=num_epochs)

    def phase(self, name: str, total: int | None = None) -> None:
        """`phase` with `name` and the number of episodes in it."""
        self._write("phase", name=name, total=total)

    def episode_finished(self, episode: EpisodeRecord) -> None:
        """`episode_finished` with `id`, `calls`, `seconds` and `failure`."""
        failure = None if episode.failure is None else f"{episode.failure.kind}: {episode.failure.reason}"
        self._write(
            "episode_finished",
            id=episode.id,
            calls=len(episode.calls),
            seconds=round(episode.seconds, 3),
            failure=failure,
        )

    def scored(self, item: EvalOutputItem) -> None:
        """`scored` with the example's `id`, `generation`, `score` and `error`."""
        self._write("scored", id=item.id, generation=item.generation, score=item.score, error=item.error)

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """`trained` with the metrics."""
        self._write("trained", epoch=epoch, metrics=metrics)

    def skipped(self, epoch: int, reason: str) -> None:
        """`skipped` with the reason."""
        self._write("skipped", epoch=epoch, reason=reason)

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """`validated` with the metrics."""
        self._write("validated", epoch=epoch, metrics=metrics)

    def message(self, text: str, *, warning: bool = False) -> None:
        """`message` with `text` and `warning`."""
        self._write("message", text=text, warning=warning)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """`finished` with the summary."""
        self._write("finished", **summary)

    def _write(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **finite(facts)}, allow_nan=False), file=self._stream, flush=True)
