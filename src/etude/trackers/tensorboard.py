"""TensorBoard: event files in a folder, one for each process that has shown the run."""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.store.files import private_folder
from etude.trackers.packages import require_package
from etude.trackers.record import COLUMNS, RunRecord, State, TrackedRun, code_version, flattened

if TYPE_CHECKING:
    from etude.config.builder import Builder


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
        rows = [*code_version(run.environment).items(), *flattened(run.config).items()]
        self._write(0, time.time(), [_text("config", _markdown(("key", "value"), rows))])
        return f"tensorboard --logdir {place}"

    def send(self, record: RunRecord) -> None:
        """Add its event, with the means, the table of episodes, alarms and pictures."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values: list[Any] = [
            Summary.Value(tag=name, simple_value=value) for name, value in sorted(record.metrics.items())
        ]
        if record.episodes:
            table = _markdown(COLUMNS, [row.cells() for row in record.episodes])
            values.append(_text(f"episodes/{record.kind}", table))
        if record.alarms:
            values.append(_text("alarms", "\n\n".join(record.alarms)))
        for name, path in record.images.items():
            values.append(Summary.Value(tag=f"plots/{name}", image=_image(path.read_bytes())))
        self._write(record.step, record.at, values)

    def close(self, state: State) -> None:
        """Close the file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _write(self, step: int, at: float, values: list[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._writer.flush()


def _text(tag: str, text: str) -> Any:
    """A value that the board of texts shows, as Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shown = SummaryMetadata.PluginData(plugin_name="text")
    metadata = SummaryMetadata(plugin_data=shown)
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _image(png: bytes) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", png[16:24])  # Where the header of every PNG has them.
    return Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)


def _markdown(columns: tuple[str, ...], rows: list[Any]) -> str:
    def line(cells: Any) -> str:
        texts = ("" if cell is None else str(cell) for cell in cells)
        return "| " + " | ".join(text.replace("|", "\\|").replace("\n", "<br>") for text in texts) + " |"

    return "\n".join([line(columns), line("---" for _ in columns), *map(line, rows)])


@register_tracker(config_type=TensorBoardConfig)
async def tensorboard(config: TensorBoardConfig, builder: Builder) -> AsyncIterator[TensorBoardTracker]:
    """Raises MissingExtraError."""
    require_package("tensorboard", "tensorboard")
    yield TensorBoardTracker(config.folder)
