"""Lineage: the job and data that made each version of a model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from etude.core.job import ModelVersion, TrainingJobRef
from etude.core.trajectory import Method
from etude.store.journal import Journal

ModelT = TypeVar("ModelT", bound=BaseModel)


class JobData(BaseModel, frozen=True):
    """The data of a job, and the version that it starts from."""

    method: Method
    rows: int
    """The number of samples."""
    data_hash: str
    """The hash of all samples, in order."""
    parent: int | None = None
    """The number of the version that the job started from; None if the backend does not report it."""
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    """The hyperparameters given with the job. The adapter's config sets the others."""
    number: int | None = None
    """The number of the version that the job makes; None after the job ended without one."""

    def differences(self, asked: JobData) -> list[str]:
        """Return how a requested job differs from this one, in words."""
        differences = {
            "other data": asked.data_hash != self.data_hash,
            f"another method ({self.method}, and not {asked.method})": asked.method != self.method,
            "other hyperparameters": asked.hyperparameters != self.hyperparameters,
            f"another start model (version {self.parent}, and not {asked.parent})": asked.parent
            != self.parent,
        }
        return [text for text, differs in differences.items() if differs]


class LineageEntry(BaseModel, frozen=True):
    """One version, with its job, its data and its training metrics."""

    version: ModelVersion
    job: TrainingJobRef
    data: JobData | None = None
    """None for a job that was submitted elsewhere."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """The training metrics that the backend reported."""
    timestamp: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """The time of adoption: ISO 8601, UTC."""


class LineageLog:
    """One model's jobs and versions in a journal. Each write returns after it is committed."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._prefix = f"groups/{name}/"

    async def add_job(self, run_id: str, data: JobData) -> None:
        """Store the data of a job before it is submitted."""
        await self._journal.put(f"{self._prefix}jobs/{run_id}", data.model_dump(mode="json"))

    def job(self, run_id: str) -> JobData | None:
        """Return the data of the job with this name; None when there is none."""
        return self._read(f"jobs/{run_id}", JobData)

    async def forget_job(self, run_id: str) -> None:
        """Delete the data of a job that was not made."""
        await self._journal.forget(f"{self._prefix}jobs/{run_id}")

    def newest(self) -> int:
        """Return the highest number of any version, including versions of submitted jobs; 0 for none."""
        promised = (job.get("number") or 0 for _, job in self._journal.scan(f"{self._prefix}jobs/"))
        return max(self.last(), max(promised, default=0))

    def last(self) -> int:
        """Return the highest number of an adopted version; 0 for none."""
        key = self._journal.last_key(f"{self._prefix}lineage/")
        return 0 if key is None else int(key.rpartition("/")[2])

    async def add(self, entry: LineageEntry) -> None:
        """Store an adopted version. An entry that exists stays as it is."""
        if self.entry(entry.version.number) is None:
            key = self._prefix + _key(entry.version.number)
            await self._journal.put(key, entry.model_dump(mode="json"))

    def entry(self, number: int) -> LineageEntry | None:
        """Return the entry of a version; None when there is none."""
        return self._read(_key(number), LineageEntry)

    def entries(self) -> list[LineageEntry]:
        """Return the entries of all versions after the base, oldest first."""
        entries = self._journal.scan(f"{self._prefix}lineage/")
        return [LineageEntry.model_validate(value) for _, value in entries]

    async def forget_after(self, number: int) -> None:
        """Delete the entries above a number, whose versions are made again. Their jobs keep their numbers."""
        for entry in reversed(self.entries()):
            if entry.version.number > number:
                await self._journal.forget(self._prefix + _key(entry.version.number))

    async def add_base(self, version: ModelVersion) -> None:
        """Store the weights that training starts with."""
        await self._journal.put(f"{self._prefix}base", version.model_dump(mode="json"))

    async def forget_base(self) -> None:
        """Delete the record of the first weights, which are made again."""
        await self._journal.forget(f"{self._prefix}base")

    def base(self) -> ModelVersion | None:
        """Return the weights that training started with."""
        return self._read("base", ModelVersion)

    async def put_state(self, state: dict[str, Any]) -> None:
        """Store the state of a group."""
        await self._journal.put(f"{self._prefix}state", state)

    def state(self) -> dict[str, Any]:
        """Return the group's last stored state; empty when there is none."""
        return dict(self._journal.get(f"{self._prefix}state", {}))

    def _read(self, key: str, model: type[ModelT]) -> ModelT | None:
        value = self._journal.get(self._prefix + key)
        return None if value is None else model.model_validate(value)


def _key(number: int) -> str:
    return f"lineage/{number:08d}"
