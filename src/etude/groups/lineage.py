"""Lineage: the job and data that made each version of a model, and the check that a version is new."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from etude.backends.capabilities import JobHyperparameters
from etude.backends.state_folders import data_hash
from etude.core.conversion import TrajectoryCollection
from etude.core.errors import TrainingError
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

    @classmethod
    def of(
        cls,
        collection: TrajectoryCollection,
        parent: ModelVersion | None,
        hyperparameters: JobHyperparameters,
    ) -> JobData:
        """Describe a job that trains on `collection` from `parent`."""
        return cls(
            method=collection.method,
            rows=len(collection),
            data_hash=data_hash(collection),
            parent=None if parent is None else parent.number,
            hyperparameters=hyperparameters.given(),
        )

    def differences(self, asked: JobData) -> list[str]:
        """Return how a requested job differs from this one, in words."""
        differences = []
        if asked.data_hash != self.data_hash:
            differences.append("other data")
        if asked.method != self.method:
            differences.append(f"another method ({self.method}, and not {asked.method})")
        if asked.hyperparameters != self.hyperparameters:
            differences.append("other hyperparameters")
        if asked.parent != self.parent:
            differences.append(f"another start model (version {self.parent}, and not {asked.parent})")
        return differences


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

    async def take_back_job(self, run_id: str, earlier: JobData | None) -> None:
        """Undo `add_job` for a job that was not made. `earlier` is the previous job with the same name."""
        if earlier is not None:
            await self.add_job(run_id, earlier)
        else:
            await self._journal.forget(f"{self._prefix}jobs/{run_id}")

    async def release(self, run_id: str) -> None:
        """Free the version number of a job that makes no version."""
        data = self.job(run_id)
        if data is not None and data.number is not None:
            await self.add_job(run_id, data.model_copy(update={"number": None}))

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

    def check(self, entry: LineageEntry) -> None:
        """Raise TrainingError if other weights already have the version's number."""
        version = entry.version
        known = self.entry(version.number)
        if known is not None and known.version.digest != version.digest:
            raise TrainingError(
                f"job {entry.job.run_id} made version {version.number} ({version.location}), and that "
                f"number belongs to what job {known.job.run_id} made ({known.version.location}); versions "
                "must count upwards. A backend that numbers versions itself has to heed `count_from`"
            )

    def entry(self, number: int) -> LineageEntry | None:
        """Return the entry of a version; None when there is none."""
        return self._read(_key(number), LineageEntry)

    def entries(self) -> list[LineageEntry]:
        """Return the entries of all versions after the base, oldest first."""
        return [
            LineageEntry.model_validate(value) for _, value in self._journal.scan(f"{self._prefix}lineage/")
        ]

    async def forget_after(self, number: int) -> None:
        """Delete the entries above a number, whose versions are made again. Their jobs keep their numbers."""
        for entry in reversed(self.entries()):
            if entry.version.number > number:
                await self._journal.forget(self._prefix + _key(entry.version.number))

    async def forget_base(self) -> None:
        """Delete the record of the first weights, which are made again."""
        await self._journal.forget(f"{self._prefix}base")

    async def add_base(self, version: ModelVersion) -> None:
        """Store the weights that training starts with."""
        await self._journal.put(f"{self._prefix}base", version.model_dump(mode="json"))

    def base(self) -> ModelVersion | None:
        """Return the weights that training started with."""
        return self._read("base", ModelVersion)

    async def put_state(self, state: dict[str, Any]) -> None:
        """Store the state of a group."""
        await self._journal.put(f"{self._prefix}state", state)

    def state(self) -> dict[str, Any] | None:
        """Return the group's last stored state; None when there is none."""
        state: dict[str, Any] | None = self._journal.get(f"{self._prefix}state")
        return state

    def _read(self, key: str, model: type[ModelT]) -> ModelT | None:
        value = self._journal.get(self._prefix + key)
        return None if value is None else model.model_validate(value)


def _key(number: int) -> str:
    return f"lineage/{number:08d}"


def check_changed(
    before: ModelVersion | None, after: ModelVersion, job: str, start: ModelVersion | None = None
) -> None:
    """Raise TrainingError unless the job made new weights with a higher version number than `before`.

    `start` is the version that the job started from, if it is not `before`.
    """
    if before is None:
        return
    if after.digest == (start or before).digest:
        raise TrainingError(
            f"job {job} says that it is completed, and the weights have not changed (digest {after.digest}). "
            "Check the learning rate, and that the trajectories have differing rewards."
        )
    if after.number <= before.number:
        raise TrainingError(
            f"job {job} made version {after.number}, and version {before.number} was there before it; "
            "versions must count upwards"
        )
