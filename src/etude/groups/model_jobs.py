"""The versions of a model, and the jobs that make the next one."""

import asyncio
import contextlib
from collections.abc import Callable
from itertools import islice

from etude.backends.state_folders import JobNameTakenError
from etude.backends.trainer_adapter import JobHyperparameters, TrainerAdapter, check_start, pauses
from etude.core.errors import EtudeError, JobStillRunning, RequestError, TrainingError
from etude.core.interfaces import Engine
from etude.core.job import (
    DryRun,
    Frozen,
    ModelVersion,
    Skipped,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
)
from etude.core.records import JobPlan, JobPlanned, LineageEntry, StartWeights
from etude.core.sample import TrajectoryCollection
from etude.engines.ledger import Ledger
from etude.groups.agents import ModelSettings
from etude.processes.status import Watchdog
from etude.store.journal import ModelLog

_LOOKS = 12
"""The number of status checks after a job was cancelled, over about ten seconds."""
_AGAIN = "Resume the run, or make the job again of the same data,"


def require_completed(ref: TrainingJobRef, status: TrainingJobStatus) -> None:
    """Raise TrainingError unless the job is completed, with the reason that the backend gave."""
    if status.status is TrainingStatusEnum.COMPLETED:
        return
    job = f"job {ref.run_id} ({ref.backend})"
    if not status.status.is_final:
        raise TrainingError(f"{job} has not ended: its status is '{status.status}'. Wait for it first")
    reason = f": {status.message.rstrip('.')}" if status.message else ""
    again = f"{_AGAIN} to try again; nothing that was collected is lost."
    raise TrainingError(f"{job} ended as '{status.status}'{reason}. {again}")


class ModelJobs:
    """The jobs of one model at one backend, from their submission to the adoption of their weights."""

    def __init__(
        self,
        model: str,
        adapter: TrainerAdapter,
        engine: Engine,
        log: ModelLog,
        *,
        settings: ModelSettings | None = None,
        warn: Callable[[str], None] = lambda text: None,
        watchdog: Watchdog | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`model` is the entry of `llms` for `engine`. `ledger` counts the cost of jobs."""
        self.model = model
        self.adapter = adapter
        self.engine = engine
        self.log = log
        self.settings = settings or ModelSettings(model)
        """The rules for which jobs are submitted, and from which weights they start."""
        self._hyperparameters = JobHyperparameters()
        self.version: ModelVersion | None = None
        """The version that the engine samples from; None when the backend does not report versions."""
        self._warn = warn
        self._watchdog = watchdog
        self._ledger = ledger
        self._warned: set[str] = set()

    @property
    def _backend(self) -> str:
        return f"'{self.adapter.adapter_config.type_name}'"

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """Train with these instead of the adapter's. Raises CapabilityError for unsupported ones."""
        self.adapter.use_hyperparameters(hyperparameters)
        self._hyperparameters = hyperparameters

    async def take_up(self, version: ModelVersion | None) -> None:
        """Resume from `version`, or start from the backend's current version.

        Raises CapabilityError if jobs cannot start from the weights that the settings ask for. Raises
        TrainingError if the engine does not sample from `version`.
        """
        if self.settings.fine_tune_from_scratch:
            check_start(self._backend, self.adapter.capabilities(), "each job starts from the base model")
        known = self.log.state
        if version is None or known.start is None:
            self.version = await self.adapter.current_version()
            if self.version is not None and known.start is None and not known.versions:
                await self.log.add(StartWeights(version=self.version))
        if version is not None:
            await self.go_back(version)

    def reason_to_skip(self, rows: int) -> Skipped | None:
        """Return why the settings forbid a job with this number of rows; None when they allow it."""
        if self.settings.freeze_agent:
            return Frozen(reason=f"the model '{self.model}' is frozen")
        if rows < self.settings.min_rows:
            least = self.settings.min_rows
            return Skipped(reason=f"too little data: {rows} rows, and at least {least} are needed")
        if self.settings.dry_run:
            return DryRun(reason="dry run: nothing was submitted", rows=rows)
        return None

    async def submit(self, collection: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start a job on the collection, or return why there is none: Frozen, DryRun, or another Skipped.

        The job starts from the current version, or from the base model with `fine_tune_from_scratch`. Its new
        version gets a number that no other version has had. Raises JobNameTakenError for the name of another
        job, CapabilityError if the backend cannot start from that version.
        """
        skipped = self.reason_to_skip(len(collection))
        if skipped is not None:
            return skipped
        start = (self.log.state.start if self.settings.fine_tune_from_scratch else None) or self.version
        name, earlier = collection.run_id, self.log.state.plans.get(collection.run_id)
        plan = JobPlan(
            method=collection.method,
            rows=len(collection),
            data_hash=collection.data_hash(),
            parent=None if start is None else start.number,
            hyperparameters=self._hyperparameters.given_values(),
        )
        if earlier is not None and (differences := earlier.differences(plan)):
            known = TrainingJobRef(run_id=name, backend=self.adapter.adapter_config.type_name)
            if await self.is_known(known):
                raise JobNameTakenError(name, differences)
        newest = self.log.state.newest_number
        number = newest + 1 if earlier is None or earlier.number is None else earlier.number
        if start is not None and self.adapter.capabilities().versions:
            # Make the backend's next job start there, whatever the backend has done meanwhile.
            last = self.log.state.last_number
            if start.number < last:
                what = f"the next job starts from version {start.number} and not from the last one, {last}"
                check_start(self._backend, self.adapter.capabilities(), what)
            await self.adapter.restore(start)
        await self.adapter.count_from(number - 1)
        plan = plan.model_copy(update={"number": number})
        if plan != earlier:
            await self.log.add(JobPlanned(name=name, plan=plan))
        if (
            self._ledger is not None
            and self._ledger.limits
            and (tokens := self.adapter.charged_tokens(collection)) is not None
        ):
            await self._ledger.begin_job(self.model, name, tokens)
        try:
            ref = await self.adapter.submit(collection)
        except RequestError:
            await self._take_back_job(name, earlier)
            raise
        if isinstance(ref, Skipped):
            await self._take_back_job(name, earlier)
            if self.version is not None and start != self.version:
                # No job was started: set the backend back to the version that is sampled from.
                await self.adapter.restore(self.version)
        return ref

    async def _take_back_job(self, name: str, earlier: JobPlan | None) -> None:
        """Record that a job was not started. `earlier` is the previous job with the same name."""
        await self.log.add(JobPlanned(name=name, plan=earlier))
        if self._ledger is not None:
            self._ledger.end_job(self.model, name, 0)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of a job, and record its end."""
        return await self.record_job_end(ref, self.status_after_loss(ref, await self.adapter.status(ref)))

    def status_after_loss(self, ref: TrainingJobRef, status: TrainingJobStatus) -> TrainingJobStatus:
        """Return the status, or completed if the backend has lost a job whose weights were adopted.

        This happens after a kill between the adoption and the record of the epoch.
        """
        plan = self.log.state.plans.get(ref.run_id) if status.status is TrainingStatusEnum.NOT_FOUND else None
        entry = None if plan is None or plan.number is None else self.log.state.versions.get(plan.number)
        if entry is None or entry.job.run_id != ref.run_id:
            return status
        made = {"version": entry.version, "metadata": {"metrics": entry.metrics}}
        return status.model_copy(update={"status": TrainingStatusEnum.COMPLETED, **made})

    async def is_known(self, ref: TrainingJobRef) -> bool:
        """Return whether the job is known. A job in this process is lost when the process ends."""
        return (await self.status(ref)).status is not TrainingStatusEnum.NOT_FOUND

    async def wait(self, ref: TrainingJobRef, seconds: float, poll_interval: float) -> TrainingJobStatus:
        """Wait for the job to complete, and return its status. Warn once with the backend's message, if any.

        After `seconds`, ask the backend to cancel the job. Raises TrainingError if the job is cancelled or
        ends without completing, and JobStillRunning if the backend does not cancel it.
        """
        try:
            async with asyncio.timeout(seconds) as limit:
                with contextlib.nullcontext() if self._watchdog is None else self._watchdog.waiting_for_job():
                    status = await self.adapter.wait_until_complete(ref, poll_interval=poll_interval)
        except TimeoutError as error:
            if not limit.expired():
                raise
            await self.adapter.cancel(ref)
            status = await self.adapter.status(ref)
            for pause in islice(pauses(1.0, 1.0), _LOOKS):
                if status.status.is_final:
                    break
                await asyncio.sleep(pause)
                status = await self.adapter.status(ref)
            late = f"job {ref.run_id} ({ref.backend}) is not done after {seconds:g} s"
            longer = "if the job needs longer, set a larger `job_timeout` (for a group: `timeout`)."
            if not status.status.is_final:
                raise JobStillRunning(
                    f"{late}. Its backend was asked to cancel it, but reports '{status.status}'. "
                    f"{_AGAIN} to wait for it again; {longer}"
                ) from error
            if status.status is not TrainingStatusEnum.COMPLETED:
                raise TrainingError(f"{late} and was cancelled. {_AGAIN} to try again; {longer}") from error
        status = self.status_after_loss(ref, status)
        require_completed(ref, await self.record_job_end(ref, status))
        if status.message:
            self._say_once(status.message)
        return status

    async def record_job_end(self, ref: TrainingJobRef, status: TrainingJobStatus) -> TrainingJobStatus:
        """Record the end of a job, and return its status.

        The tokens that the backend reports replace the ledger's estimate. The version number of a job that
        made no version becomes free.
        """
        if not status.status.is_final:
            return status
        tokens = status.metrics.get("trained_tokens")
        if status.status is TrainingStatusEnum.FAILED and tokens is None:
            tokens = 0  # No backend charges for failed jobs.
        if self._ledger is not None and tokens is not None:
            self._ledger.end_job(self.model, ref.run_id, int(tokens))
        plan = self.log.state.plans.get(ref.run_id)
        is_void = status.status is not TrainingStatusEnum.COMPLETED
        if is_void and plan is not None and plan.number is not None:
            given_back = plan.model_copy(update={"number": None})
            await self.log.add(JobPlanned(name=ref.run_id, plan=given_back))
        return status

    async def adopt(self, ref: TrainingJobRef, status: TrainingJobStatus) -> ModelVersion | None:
        """Sample from a completed job's weights, after a check that they are new, and return their version.

        On an error, the engine and the lineage keep the previous version. Returns None if the backend does
        not report versions. Raises TrainingError if it should and does not, or if the check fails.
        """
        version, before = status.version, self.version
        if version is None and self.adapter.capabilities().versions:
            raise TrainingError(
                f"job {ref.run_id} ({ref.backend}) is completed, but did not report which weights it made"
            )
        if version is None:
            self._say_once(
                f"{ref.backend} does not report which weights a job made. Etude cannot check that they "
                "changed, or that the next episodes are sampled from them"
            )
            return None
        known = self.log.state.versions.get(version.number)
        start = (self.log.state.start if self.settings.fine_tune_from_scratch else None) or before
        if start is not None and version.digest == start.digest:
            raise TrainingError(
                f"job {ref.run_id} is completed, but the weights have not changed (digest "
                f"{version.digest}). Check the learning rate, and whether the rewards differ."
            )
        taken = None
        if known is not None and known.version.digest != version.digest:
            taken = f"job {known.job.run_id} has already made that version ({known.version.location})"
        elif before is not None and version.number <= before.number:
            taken = f"the version before it is {before.number}"
        if taken is not None:
            raise TrainingError(
                f"job {ref.run_id} made version {version.number} ({version.location}), but {taken}. Versions "
                "must count upwards: a backend that numbers them itself must follow `count_from`"
            )
        try:
            await self.sample_from(version)
        except EtudeError:
            if before is not None:
                with contextlib.suppress(EtudeError):
                    await self.engine.adopt(before)
            raise
        if version.number not in self.log.state.versions:
            plan = self.log.state.plans.get(ref.run_id)
            await self.log.add(LineageEntry(version=version, job=ref, data=plan, metrics=status.metrics))
        return version

    async def go_back(self, version: ModelVersion) -> None:
        """Sample from an earlier version again, and start the next job from it and its optimiser state.

        Raises TrainingError if the engine does not sample from it.
        """
        await self.adapter.restore(version)
        await self.sample_from(version)

    async def sample_from(self, version: ModelVersion) -> None:
        """Make the engine sample from `version`. Raises TrainingError if it does not."""
        await self.engine.adopt(version)
        if self.engine.version != version.number:
            raise TrainingError(
                f"the model {self.model!r} still samples from version {self.engine.version} after adopting "
                f"version {version.number} ({version.location}): the policy sampled next would not be the "
                "one trained"
            )
        self.version = version

    def _say_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
