"""Lineage: where each version of a model came from, as it is kept in the run's journal."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from etude.core.job import ModelVersion, TrainingJobRef
from etude.core.trajectory import Method, TrajectoryCollection
from etude.store.journal import Journal


class JobData(BaseModel):
    """What a job was given."""

    model_config = ConfigDict(frozen=True)

    method: Method
    rows: int
    """Trajectories."""
    data_hash: str
    """Hash of all of them, in order."""
    parent: int | None = None
    """Number of the version that it started from, where the backend says."""

    @classmethod
    def of(cls, collection: TrajectoryCollection, parent: ModelVersion | None) -> JobData:
        """What `collection` is, for a job that starts from `parent`."""
        number = None if parent is None else parent.number
        return cls(
            method=collection.method, rows=len(collection), data_hash=data_hash(collection), parent=number
        )


class LineageEntry(BaseModel):
    """One version, and the job, the data and the metrics that made it."""

    model_config = ConfigDict(frozen=True)

    version: ModelVersion
    job: TrainingJobRef
    data: JobData | None = None
    """None for a job that was submitted elsewhere."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """Of the training, as the backend told them."""
    timestamp: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """When it was adopted: ISO 8601, UTC."""


class LineageLog:
    """The steps of one model's line in a journal. All writes return when they are committed."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._prefix = f"groups/{name}/"

    async def add_job(self, run_id: str, data: JobData) -> None:
        """Note what a job is about to be given."""
        await self._journal.put(f"{self._prefix}jobs/{run_id}", data.model_dump(mode="json"))

    def job(self, run_id: str) -> JobData | None:
        """What a job was given."""
        found = self._journal.get(f"{self._prefix}jobs/{run_id}")
        return None if found is None else JobData.model_validate(found)

    async def add(self, entry: LineageEntry) -> None:
        """Note a version that was adopted."""
        number = entry.version.number
        await self._journal.put(f"{self._prefix}lineage/{number:08d}", entry.model_dump(mode="json"))

    def entries(self) -> list[LineageEntry]:
        """All versions after the base, oldest first."""
        return [
            LineageEntry.model_validate(value) for _, value in self._journal.scan(f"{self._prefix}lineage/")
        ]

    async def add_base(self, version: ModelVersion) -> None:
        """Note the weights that the line begins with."""
        await self._journal.put(f"{self._prefix}base", version.model_dump(mode="json"))

    def base(self) -> ModelVersion | None:
        """The weights that the line began with."""
        found = self._journal.get(f"{self._prefix}base")
        return None if found is None else ModelVersion.model_validate(found)

    async def put_state(self, state: dict[str, Any]) -> None:
        """Keep a group's state."""
        await self._journal.put(f"{self._prefix}state", state)

    def state(self) -> dict[str, Any] | None:
        """The group's state as it was kept last."""
        found: dict[str, Any] | None = self._journal.get(f"{self._prefix}state")
        return found


def data_hash(collection: TrajectoryCollection) -> str:
    """A hash of the trajectories, whatever the collection is called; 32 hexadecimal digits."""
    digest = hashlib.blake2b(collection.method.encode(), digest_size=16)
    for group in collection.trajectories:
        digest.update(b"\n[")
        for trajectory in group:
            digest.update(trajectory.model_dump_json().encode() + b"\n")
    return digest.hexdigest()
