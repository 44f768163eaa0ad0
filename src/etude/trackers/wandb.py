"""Weights & Biases: one run of a project, online or offline, whose id is the token of the journal.

The step of W&B counts records; charts have `epoch` as their axis. Online, W&B says when a run goes on how far
it has come. Offline there is nobody to ask but the files, so these are read.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.trackers.extras import require_package
from etude.trackers.record import COLUMNS, RunRecord, State, TrackedRun, code_version
from etude.trackers.servers import SECONDS_TO_ANSWER, require_server

if TYPE_CHECKING:
    from etude.config.builder import Builder

_HEADER, _BLOCK = 7, 32768
"""Of a `.wandb` file, which is a log of LevelDB's format: bytes before the first block, and of a block."""
_LAST_KINDS = (1, 4)
"""Of a chunk that ends an entry: it is whole, or the last of several."""


class WandbConfig(TrackerConfig, name="wandb"):
    """A run of Weights & Biases. `wandb login` or WANDB_API_KEY says whose."""

    project: str = "etude"
    """Its project, which is made where there is none."""
    entity: str | None = None
    """The user or team; left out: the default of the account."""
    mode: Literal["online", "offline"] | None = None
    """`offline` keeps it in the run folder, for `wandb sync`; left out: as WANDB_MODE says, or online."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""
    group: str | None = None
    """The group that the run belongs to."""

    def destination(self) -> str:
        place = self.project if self.entity is None else f"{self.entity}/{self.project}"
        return f"project {place}" + (", offline" if self.mode == "offline" else "")


class WandbTracker:
    """Logs the records of a run."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None
        self._name = ""
        """Of the artefact of weights, whose versions are the run's."""
        self._steps: set[int] | None = None
        """Of an offline run: the steps that its files have."""
        self._next_step = 0
        """Of an online run: the first one that W&B does not have."""

    def open(self, run: TrackedRun) -> str:
        """Begin the run, or go on with it. Raises EtudeError where there is no server."""
        import wandb

        self.close("stopped")
        config, settings = self._config, wandb.setup().settings
        if (config.mode or settings.mode) == "online":
            # It tries for a minute itself, and no program ends meanwhile.
            require_server(settings.base_url)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            id=run.token,
            name=run.name,
            resume="allow",
            mode=config.mode,
            dir=str(run.folder),
            tags=config.tags or None,
            group=config.group,
            config={**run.config, "code": code_version(run.environment)},
            allow_val_change=True,
            # A run of the user's own, in the same process, is left as it is.
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=max(config.patience, SECONDS_TO_ANSWER),
                finish_timeout=config.patience or 1.0,
            ),
        )
        self._run.define_metric("epoch")
        self._run.define_metric("*", step_metric="epoch")
        self._next_step, self._steps, self._name = self._run.starting_step, None, run.unique_name
        if self._run.offline:
            files = (run.folder / "wandb").glob(f"offline-run-*-{run.token}/*.wandb")
            self._steps = {step for file in files for step in steps_in(file)}
            return f"wandb sync {run.folder / 'wandb' / f'offline-run-*-{run.token}'}"
        return str(self._run.url or "")

    def has(self, record: RunRecord) -> bool | None:
        """Whether W&B has its step; of an offline run, whose files are written some seconds later, if so."""
        if self._steps is not None:
            return True if record.number in self._steps else None
        return record.number < self._next_step

    def send(self, record: RunRecord) -> None:
        """Log its metrics, table and pictures as one step, and the weights as artefacts."""
        import wandb

        data: dict[str, Any] = {**record.metrics, "epoch": record.step}
        if record.episodes:
            rows = [list(row.cells()) for row in record.episodes]
            data[f"episodes/{record.kind}"] = wandb.Table(columns=list(COLUMNS), data=rows)
        if record.alarms:
            data["alarms"] = wandb.Table(columns=["alarm"], data=[[text] for text in record.alarms])
        for name, path in record.images.items():
            data[f"plots/{name}"] = wandb.Image(str(path))
        for each in record.checkpoints:
            name = self._name if each.target is None else f"{self._name}-{each.target}"
            about = {"epoch": record.step, "version": each.version}
            artifact = wandb.Artifact(name=name, type="model", metadata=about)
            artifact.add_dir(str(each.folder))
            self._run.log_artifact(artifact, aliases=[*each.aliases])
        self._run.log(data, step=record.number, commit=True)

    def close(self, state: State) -> None:
        """Finish the run as far as this process goes, once all of it is uploaded or on the disk."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=int(state != "finished"))


def steps_in(file: Path) -> Iterator[int]:
    """The steps of the records that a `.wandb` file has as a whole."""
    from wandb.proto.wandb_internal_pb2 import Record

    for entry in _entries(file.read_bytes()):
        record = Record.FromString(entry)
        if record.WhichOneof("record_type") == "history":
            yield record.history.step.num


def _entries(content: bytes) -> Iterator[bytes]:
    """The entries of a log of LevelDB's format, up to one that is cut off."""
    position, parts = _HEADER, b""
    while position + 7 <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        chunk = content[position + 7 : position + 7 + length]
        if len(chunk) < length or kind == 0:
            return
        parts += chunk
        position += 7 + length
        if kind in _LAST_KINDS:
            yield parts
            parts = b""


@register_tracker(config_type=WandbConfig)
async def wandb(config: WandbConfig, builder: Builder) -> AsyncIterator[WandbTracker]:
    """Raises MissingExtraError."""
    require_package("wandb", "wandb")
    yield WandbTracker(config)
