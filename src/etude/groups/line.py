"""The line of a model: its versions, and the jobs that make the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from etude.adapters.capabilities import check_from_base
from etude.adapters.trainer_adapter import TrainerAdapter
from etude.core.errors import EtudeError
from etude.core.job import ModelVersion, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.skipped import DryRun, Frozen, Skipped
from etude.core.trajectory import TrajectoryCollection
from etude.groups.following import require_completed, version_of, wait_for
from etude.groups.lineage import JobData, LineageEntry, LineageLog
from etude.groups.liveness import check_adopted, check_changed
from etude.inference.engine import Engine
from etude.store.journal import Journal

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LineRules:
    """What is submitted, and from which weights."""

    frozen: bool = False
    """Submit nothing."""
    dry_run: bool = False
    """Make everything ready, and submit nothing."""
    min_rows: int = 1
    """Fewer trajectories are too little to train on."""
    from_scratch: bool = False
    """Start each job from the base model and not from the last version."""


class ModelLine:
    """Submits the jobs of one model to one backend, follows them, and adopts the weights that they make."""

    def __init__(
        self,
        name: str,
        model: str,
        adapter: TrainerAdapter,
        engine: Engine,
        journal: Journal,
        *,
        rules: LineRules | None = None,
        warn: Warn = lambda text: None,
    ) -> None:
        """`name` is unique within the run; `model` is the entry of `llms` that `engine` is."""
        self.name = name
        self.model = model
        self.adapter = adapter
        self.engine = engine
        self.log = LineageLog(journal, name)
        self.rules = rules or LineRules()
        self.version: ModelVersion | None = None
        """The weights that are sampled from, where the backend says."""
        self._warn = warn
        self._told: set[str] = set()

    async def take_up(self, version: ModelVersion | None) -> None:
        """Go on from `version`, or begin with what the backend has.

        Raises CapabilityError when jobs cannot start from where the rules say, TrainingError when the
        engine does not sample from `version`.
        """
        if self.rules.from_scratch:
            check_from_base(f"'{self.adapter.adapter_config.type_name}'", self.adapter.capabilities())
        if version is not None:
            await self.adapter.restore(version)
            await self.sample_from(version)
            return
        self.version = await self.adapter.current_version()
        if self.version is not None and self.log.base() is None:
            await self.log.add_base(self.version)

    async def submit(self, collection: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start a job on the collection, or say why there is none: Frozen, DryRun, or another Skipped."""
        rules, rows = self.rules, len(collection)
        if rules.frozen:
            return Frozen(reason=f"the model '{self.model}' is frozen")
        if rows < rules.min_rows:
            return Skipped(reason=f"too little data: {rows} rows, and at least {rules.min_rows} are needed")
        if rules.dry_run:
            return DryRun(reason="dry run: nothing was submitted", rows=rows)
        start = self.version
        if rules.from_scratch and (base := self.log.base()) is not None:
            await self.adapter.restore(base)
            start = base
        await self.log.add_job(collection.run_id, JobData.of(collection, start))
        ref = await self.adapter.submit(collection)
        if isinstance(ref, Skipped) and self.version is not None and start != self.version:
            # Nothing is being trained after all: sampling goes on from where it was.
            await self.adapter.restore(self.version)
        return ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where a job stands."""
        return await self.adapter.status(ref)

    async def is_known(self, ref: TrainingJobRef) -> bool:
        """Whether the backend still has the job; an in-process job is gone with its process."""
        return (await self.status(ref)).status is not TrainingStatusEnum.NOT_FOUND

    async def wait(self, ref: TrainingJobRef, seconds: float, poll_interval: float) -> TrainingJobStatus:
        """The status of the completed job; what the backend has to say about it is passed on, once.

        Raises TrainingError when it ends otherwise, or not in time.
        """
        status = await wait_for(self.adapter, ref, seconds, poll_interval)
        require_completed(ref, status)
        if status.message:
            self._say_once(status.message)
        return status

    async def adopt(self, ref: TrainingJobRef, status: TrainingJobStatus) -> ModelVersion | None:
        """Sample from the weights that a completed job made, once it is sure that they are new.

        Either the engine has them and the lineage says so, or everything is as it was. None when the
        backend does not say what it made. Raises TrainingError.
        """
        version = version_of(status, self.adapter.capabilities().versions, ref)
        if version is None:
            self._say_once(
                f"{ref.backend} does not say what weights it made: it cannot be checked that they changed, "
                "nor that the next episodes are sampled from them"
            )
            return None
        before = self.version
        check_changed(before, version, ref.run_id, self.log.base() if self.rules.from_scratch else None)
        try:
            await self.sample_from(version)
        except EtudeError:
            if before is not None:
                with contextlib.suppress(EtudeError):
                    await self.engine.adopt(before)
            raise
        metrics: dict[str, Any] = (status.metadata or {}).get("metrics", {})
        await self.log.add(
            LineageEntry(version=version, job=ref, data=self.log.job(ref.run_id), metrics=metrics)
        )
        return version

    async def sample_from(self, version: ModelVersion) -> None:
        """Have the engine sample from `version`. Raises TrainingError when it does not."""
        await self.engine.adopt(version)
        check_adopted(self.engine.version, version, self.model)
        self.version = version

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._warn(text)

    async def prune(self, keep: Collection[ModelVersion]) -> None:
        """Let the backend delete the weights of other versions."""
        await self.adapter.prune(keep)
