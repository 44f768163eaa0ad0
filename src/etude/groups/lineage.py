"""Lineage: the job and data behind each version of a model, and whether a version is new and in use."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from etude.backends.capabilities import JobHyperparameters
from etude.core.edge import TrajectoryCollection
from etude.core.errors import TrainingError
from etude.core.job import ModelVersion, TrainingJobRef
from etude.core.trajectory import Method
from etude.jobs.folders import data_hash
from etude.store.journal import Journal

ModelT = TypeVar("ModelT", bound=BaseModel)


class JobData(BaseModel, frozen=True):
    """The data of a job, and where it starts from."""

    method: Method
    rows: int
    """Trajectories."""
    data_hash: str
    """Hash of all of them, in order."""
    parent: int | None = None
    """Number of the version that it started from, where the backend says."""
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    """Those that its maker gave; the others are as the adapter's config has them."""
    number: int | None = None
    """Of the version that it makes; None once it is known that it makes none."""

    @classmethod
    def of(
        cls,
        collection: TrajectoryCollection,
        parent: ModelVersion | None,
        hyperparameters: JobHyperparameters,
    ) -> JobData:
        """The data of a job that trains on `collection` from `parent`."""
        return cls(
            method=collection.method,
            rows=len(collection),
            data_hash=data_hash(collection),
            parent=None if parent is None else parent.number,
            hyperparameters=hyperparameters.given(),
        )

    def differences(self, asked: JobData) -> list[str]:
        """In which ways a job that is asked for differs from this one, in words."""
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
    """One version, and the job, the data and the metrics that made it."""

    version: ModelVersion
    job: TrainingJobRef
    data: JobData | None = None
    """None for a job that was submitted elsewhere."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """Of the training, as the backend reports them."""
    timestamp: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """When it was adopted: ISO 8601, UTC."""


class LineageLog:
    """The steps of one model's line in a journal. All writes return when they are committed."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._prefix = f"groups/{name}/"

    async def add_job(self, run_id: str, data: JobData) -> None:
        """Note the data of a job that is about to be submitted."""
        await self._journal.put(f"{self._prefix}jobs/{run_id}", data.model_dump(mode="json"))

    def job(self, run_id: str) -> JobData | None:
        """The data of a job; None when none of that name is noted."""
        return self._read(f"jobs/{run_id}", JobData)

    async def take_back_job(self, run_id: str, earlier: JobData | None) -> None:
        """Undo `add_job` for a job that was not made; `earlier` is the one that had the name before."""
        if earlier is not None:
            await self.add_job(run_id, earlier)
        else:
            await self._journal.forget(f"{self._prefix}jobs/{run_id}")

    async def release(self, run_id: str) -> None:
        """Note that a job makes no version: its number can be another's."""
        data = self.job(run_id)
        if data is not None and data.number is not None:
            await self.add_job(run_id, data.model_copy(update={"number": None}))

    def newest(self) -> int:
        """The highest number that a version has, or will have by a job that was submitted; 0 for none."""
        promised = (job.get("number") or 0 for _, job in self._journal.scan(f"{self._prefix}jobs/"))
        return max(self.last(), max(promised, default=0))

    def last(self) -> int:
        """The highest number of a version that was adopted; 0 for none."""
        key = self._journal.last_key(f"{self._prefix}lineage/")
        return 0 if key is None else int(key.rpartition("/")[2])

    async def add(self, entry: LineageEntry) -> None:
        """Note a version that was adopted; one that is noted stays as it is."""
        if self.entry(entry.version.number) is None:
            key = self._prefix + _key(entry.version.number)
            await self._journal.put(key, entry.model_dump(mode="json"))

    def check(self, entry: LineageEntry) -> None:
        """Raise TrainingError when other weights have the number of the version."""
        version = entry.version
        known = self.entry(version.number)
        if known is not None and known.version.digest != version.digest:
            raise TrainingError(
                f"job {entry.job.run_id} made version {version.number} ({version.location}), and that "
                f"number belongs to what job {known.job.run_id} made ({known.version.location}); versions "
                "must count upwards. A backend that numbers versions itself has to heed `count_from`"
            )

    def entry(self, number: int) -> LineageEntry | None:
        """The entry of a version; None when it has none."""
        return self._read(_key(number), LineageEntry)

    def entries(self) -> list[LineageEntry]:
        """All versions after the base, oldest first."""
        return [
            LineageEntry.model_validate(value) for _, value in self._journal.scan(f"{self._prefix}lineage/")
        ]

    async def forget_after(self, number: int) -> None:
        """Forget the versions above a number, which are made again; their jobs keep their numbers."""
        for entry in reversed(self.entries()):
            if entry.version.number > number:
                await self._journal.forget(self._prefix + _key(entry.version.number))

    async def forget_base(self) -> None:
        """Forget the weights that the line began with: they are made again."""
        await self._journal.forget(f"{self._prefix}base")

    async def add_base(self, version: ModelVersion) -> None:
        """Note the weights that the line begins with."""
        await self._journal.put(f"{self._prefix}base", version.model_dump(mode="json"))

    def base(self) -> ModelVersion | None:
        """The weights that the line began with."""
        return self._read("base", ModelVersion)

    async def put_state(self, state: dict[str, Any]) -> None:
        """Keep a group's state."""
        await self._journal.put(f"{self._prefix}state", state)

    def state(self) -> dict[str, Any] | None:
        """The group's state as it was kept last."""
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
    """Raise TrainingError unless the job made new weights, under a number that follows that of `before`.

    `start` is the version that the job started from, where that is not `before`.
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
