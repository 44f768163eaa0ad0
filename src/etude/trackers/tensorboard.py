"""TensorBoard: event files in a folder, one for each process that has shown the run.

Each record is one event with all of its values, so that it is there as a whole or not at all; and what is
there already is read from the files when they are opened.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic import field_validator

from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.store.files import open_private, private_folder
from etude.trackers.extras import require_package
from etude.trackers.record import COLUMNS, RunRecord, State, TrackedRun, code_version, flattened

if TYPE_CHECKING:
    from etude.config.builder import Builder

_FORMAT = "brain.Event:2"
_CONFIG, _KEY = "config", "etude/record"


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
        self._file: IO[bytes] | None = None
        self._known: set[str] = set()

    def open(self, run: TrackedRun) -> str:
        """Read what is there, and begin a file."""
        self.close("stopped")
        place = run.folder / "tensorboard"
        if self._folder is not None:
            place = self._folder / run.unique_name
        private_folder(place)
        self._known = {key for file in sorted(place.glob("events.out.tfevents.*")) for key in _keys_in(file)}
        # TensorBoard reads the files by their names, and each up to its end.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open_private(place / name, "wb")
        self._write(file_version=_FORMAT, wall_time=time.time())
        if _CONFIG not in self._known:
            rows = [*code_version(run.environment).items(), *flattened(run.config).items()]
            self._add(_CONFIG, 0, time.time(), [_text(_CONFIG, _markdown(("key", "value"), rows))])
        return f"tensorboard --logdir {place}"

    def has(self, record: RunRecord) -> bool | None:
        """Whether a file has it."""
        return record.key in self._known

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
        self._add(record.key, record.step, record.at, values)

    def close(self, state: State) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, key: str, step: int, at: float, values: list[Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(wall_time=at, step=step, summary=Summary(value=[*values, _marker(key)]))
        self._known.add(key)

    def _write(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None
        writer = RecordWriter(self._file)
        writer.write(Event(**event).SerializeToString())
        writer.flush()


def _marker(key: str) -> Any:
    """A value that no board shows, and that names the record of an event."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    hidden = SummaryMetadata.PluginData(plugin_name="etude")
    return Summary.Value(tag=f"{_KEY}/{key}", metadata=SummaryMetadata(plugin_data=hidden))


def _keys_in(file: Path) -> Iterator[str]:
    """The keys of the records that a file has as a whole."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for content in RawEventFileLoader(str(file)).Load():
        for value in Event.FromString(content).summary.value:
            if value.tag.startswith(f"{_KEY}/"):
                yield value.tag.removeprefix(f"{_KEY}/")


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
    tracker = TensorBoardTracker(config.folder)
    yield tracker
