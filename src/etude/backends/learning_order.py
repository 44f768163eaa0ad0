"""A job of the adapter `local` as processes on a cluster's nodes get it, and the news that they send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from etude.backends.local_config import LocalAdapterConfig, LoraConfig
from etude.backends.local_job import Job
from etude.core.job import ModelVersion
from etude.core.trajectory import TrajectoryCollection
from etude.jobs.content import JobContent
from etude.learner.learner import LearnerOptions
from etude.store.files import write_atomically

_ORDER, _DATA = "order.json", "collection.json"
_PROGRESS, _NOTE, _FAILURE = "progress.json", "note.json", "failure.json"


class LearningOrder(BaseModel):
    """All that a job is made of but its data, which lies beside it. It has no secrets."""

    model_config = ConfigDict(frozen=True)

    job: str
    number: int
    """Of the version that it makes."""
    versions: Path
    """The folder of all versions."""
    model: str
    device: str
    dtype: str
    """Of the weights that the agents sample from."""
    lora: LoraConfig | None
    seed: int
    start: ModelVersion
    begins_from: ModelVersion | None
    """The version that a warm-up made, which training begins with in place of the base model."""
    config: LocalAdapterConfig
    options: LearnerOptions
    algorithm: str
    """The import path of its class."""
    gradient: dict[str, Any]
    """The options of its gradient."""
    content: JobContent

    def write(self, folder: Path, data: TrajectoryCollection) -> None:
        """Write order and data. Raises StoreError."""
        write_atomically(folder / _DATA, data.model_dump_json(), exact=True)
        write_atomically(folder / _ORDER, self.model_dump_json(), exact=True)

    @classmethod
    def read(cls, folder: Path) -> tuple[LearningOrder, TrajectoryCollection]:
        """The order and the data in a job's folder."""
        order = cls.model_validate_json((folder / _ORDER).read_text(encoding="utf-8"))
        data = TrajectoryCollection.model_validate_json((folder / _DATA).read_text(encoding="utf-8"))
        return order, data


class JobDesk:
    """The head's end of the line on which processes say how their job goes: files in its folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def stepped(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        """A step was taken."""
        progress = {"step": step, "of": of, "metrics": dict(metrics)}
        write_atomically(self._folder / _PROGRESS, json.dumps(progress))

    def noted(self, note: str) -> None:
        """Something that a person should know once the job is done."""
        write_atomically(self._folder / _NOTE, json.dumps(note))

    def failed(self, reason: str) -> None:
        """It would fail again; the reason that comes first counts."""
        if not (self._folder / _FAILURE).exists():
            write_atomically(self._folder / _FAILURE, json.dumps(reason))


class JobNews:
    """The news from the desk of a job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Forget what was said of an earlier attempt."""
        for name in (_PROGRESS, _NOTE, _FAILURE):
            (self._folder / name).unlink(missing_ok=True)

    @property
    def failure(self) -> str | None:
        """Why the job has failed, if it has."""
        reason: str | None = self._read(_FAILURE)
        return reason

    @property
    def note(self) -> str | None:
        """Something that a person should know once the job is done."""
        note: str | None = self._read(_NOTE)
        return note

    @property
    def step(self) -> int:
        """The last step that was taken."""
        return int((self._read(_PROGRESS) or {"step": 0})["step"])

    def tell(self, job: Job) -> None:
        """Hand the progress on."""
        progress = self._read(_PROGRESS)
        if progress is not None:
            job.metrics, job.progress = progress["metrics"], 100.0 * progress["step"] / progress["of"]

    def _read(self, name: str) -> Any:
        with suppress(FileNotFoundError):
            return json.loads((self._folder / name).read_text(encoding="utf-8"))
        return None
