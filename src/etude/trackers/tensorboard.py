"""TensorBoard: event files in a folder, one for each process that has shown the run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.store.files import private_folder
from etude.trackers.record import RunRecord, State, TrackedRun, require_package


class TensorBoardConfig(TrackerConfig, name="tensorboard"):
    """Event files for TensorBoard; `tensorboard --logdir` shows those of all runs below a folder."""

    folder: Path | None = None
    """The folder of folders, one for each run; left out: `tensorboard/` in the run's own folder."""

    @field_validator("folder")
    @classmethod
    def _wherever_it_is_resumed(cls, folder: Path | None) -> Path | None:
        return None if folder is None else folder.expanduser().absolute()

    def destination(self) -> str:
        return "" if self.folder is None else str(self.folder)


class TensorBoardTracker:
    """Writes the records of a run as events."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, run: TrackedRun) -> str:
        """Begin a file, with the config."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.close("stopped")
        place = run.folder / "tensorboard" if self._folder is None else self._folder / run.unique_name
        private_folder(place)
        self._writer = EventFileWriter(str(place))
        self._write(0, time.time(), [], {"config": _markdown(run.code | run.flat_config)})
        return f"tensorboard --logdir {place}"

    def send(self, record: RunRecord) -> None:
        """Add its event, with the means and the alarms."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = sorted(record.metrics.items())
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers]
        self._write(record.step, record.at, values, {"alarms": "\n\n".join(record.alarms)})

    def close(self, state: State) -> None:
        """Close the file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _write(self, step: int, at: float, values: list[Any], texts: Mapping[str, str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        shown = [value for name, text in texts.items() if text for value in text_pb(name, text).value]
        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=[*values, *shown])))
        self._writer.flush()


def _markdown(rows: Mapping[str, str]) -> str:
    """A table of two columns."""
    lines = ["| key | value |", "| --- | --- |"]
    for key, value in rows.items():
        text = value.replace("|", "\\|").replace("\n", "<br>")
        lines.append(f"| {key} | {text} |")
    return "\n".join(lines)


@register_tracker(config_type=TensorBoardConfig)
async def tensorboard(config: TensorBoardConfig, builder: Builder) -> AsyncIterator[TensorBoardTracker]:
    """Raises MissingExtraError."""
    require_package("tensorboard", "tensorboard")
    yield TensorBoardTracker(config.folder)
