"""Training on a cluster: the run's process starts a team of processes per job, and adopts its version.

The run writes an order into the job's folder, where the team's leader writes the job's progress.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from etude.algorithms.algorithm import Algorithm
from etude.backends.job_training import (
    PEER_SECONDS,
    JobListener,
    do_part,
    loading_options,
    stop_events,
    units_of_collection,
)
from etude.backends.local_job import (
    ORDER,
    FinishedJob,
    Job,
    JobProgress,
    JobSpec,
    forget_progress,
    learner_options,
    note_failure,
    read_failure,
    training_error,
)
from etude.backends.state_folders import StateFolders
from etude.config.finetuning import FinetuneConfig
from etude.config.import_path import import_object, make_importable
from etude.config.registry import load_entry_points
from etude.core.errors import EtudeError, TrainingError, error_words
from etude.core.job import ModelVersion
from etude.core.keys import content_hash, fold
from etude.core.process import set_up_process
from etude.engines.child_process import last_lines
from etude.learner.learner import Learner, TrainingCanceled
from etude.learner.optimiser import Step
from etude.learner.team import Team, join_team
from etude.models.device import dtype_name
from etude.models.policy import LoraOptions, Policy
from etude.models.source import local_path
from etude.processes.pool import Cluster
from etude.processes.team import MemberProgram, TeamMember, TeamRun
from etude.store.files import private_folder, write_atomically

_LOG = logging.getLogger("etude.learners")
_MODULE = "etude.backends.cluster_training"
_ATTEMPTS = 3
"""The number of teams that may end without a checkpoint before the job fails."""
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 20.0
"""Seconds for a team to write a checkpoint and end after its job is canceled."""


@dataclass(frozen=True, slots=True)
class Learners:
    """The processes of a cluster that train for a run."""

    cluster: Cluster
    count: int
    folder: Path
    """The run's folder for unfinished jobs and the log."""
    device: str
    """The device that the config names for the model."""


@dataclass(slots=True)
class ClusterLearners:
    """A trainer of jobs on other machines, which see the run folder at the same path.

    If a team ends early, for any reason, the next one resumes from the job's last checkpoint. This also holds
    after the run's own process was killed, because its team ends with it.
    """

    learners: Learners
    policy: Policy
    versions: StateFolders
    run: FinetuneConfig
    begins_from: ModelVersion | None = None
    """The version that a warm-up made, where training starts."""
    note: str | None = None
    """A message for the user about the last job."""

    def keep(self) -> None:
        """Do nothing: each version is on disk when its job ends."""

    def close(self) -> None:
        """Do nothing: this process holds no resources."""

    def go_to(self, number: int) -> None:
        """Do nothing: the processes read the optimiser state from the start version's folder."""

    def begin_from(self, version: ModelVersion) -> None:
        """Give jobs that start from this version no optimiser state."""
        self.begins_from = version

    async def train(self, job: Job, start: ModelVersion) -> FinishedJob:
        """Start teams for the job, one after another, until one has made its version."""
        name = content_hash([job.name, asdict(job.content), start.digest])
        folder = self.learners.folder / f"job-{name}"
        async with self.learners.cluster.turn:
            await asyncio.to_thread(self._prepare, folder, job, start)
            finished = await self._attempts(job, folder)
        await asyncio.to_thread(self.policy.adopt, finished.version)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return finished

    async def _attempts(self, job: Job, folder: Path) -> FinishedJob:
        """Raises TrainingError with a failed job's cause, or if several teams ended without progress."""
        checkpoints = StateFolders(folder, "step-", "checkpoint")
        attempts, newest = 0, checkpoints.newest()
        while True:
            cause = await self._work(job, folder)
            news = JobProgress.read(folder)
            if (made := self._find_finished_job(job)) is not None:
                self.note = news.note
                return made
            if (failure := read_failure(folder)) is not None:
                raise TrainingError(failure)
            if job.canceled.is_set():
                raise TrainingCanceled(f"canceled after {news.step} steps")
            step = checkpoints.newest()
            attempts, newest = 0 if step > newest else attempts + 1, step
            if attempts == _ATTEMPTS:
                lines = last_lines(self._log, 5).replace("\n", " | ")
                raise TrainingError(
                    f"its learners ended {attempts} times without a checkpoint ({cause}); see {self._log}: "
                    f"{lines}"
                )
            goes_on = f"continues from step {step}" if step else "begins anew"
            job.news = f"its learners ended early ({cause}); the job {goes_on}"
            _LOG.warning("job %s: %s", job.name, job.news)

    async def _work(self, job: Job, folder: Path) -> str:
        """Start a team and wait for its end. Return why it ended. Ask it to end if its job is canceled."""
        learners, cluster = self.learners, self.learners.cluster
        assert cluster.learners is not None
        places = partial(cluster.learners, on_gpus=learners.device != "cpu")
        program = MemberProgram(_MODULE, (str(folder),), learners.folder)
        team = TeamRun(places, program, learners.count, self._log)
        cluster.teams.add(team)
        ending = asyncio.ensure_future(team.ended())
        asked: asyncio.Future[None] | None = None
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=_LOOK_SECONDS)
                if (news := JobProgress.read(folder)).of:
                    job.metrics, job.progress = news.metrics, 100.0 * news.step / news.of
                if job.canceled.is_set() and asked is None:
                    asked = asyncio.ensure_future(team.end(_GRACE_SECONDS))
        finally:
            await team.end(0.0)
            cluster.teams.discard(team)
        return ending.result() or "all of them are done"

    @property
    def _log(self) -> Path:
        return self.learners.folder / "learners.log"

    def _prepare(self, folder: Path, job: Job, start: ModelVersion) -> None:
        """Write the order of a job, and delete the folders of other jobs."""
        for other in self.learners.folder.glob("job-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        private_folder(folder)
        forget_progress(folder)
        source, algorithm = local_path(self.policy.source), type(job.algorithm)
        order = JobSpec(
            job=job.name,
            number=job.number,
            versions=self.versions.folder(0).parent.absolute(),
            model=self.policy.source if source is None else str(source.absolute()),
            device=self.learners.device,
            dtype=dtype_name(next(self.policy.model.parameters()).dtype),
            seed=job.seed,
            start=_with_absolute_location(start),
            begins_from=self.begins_from and _with_absolute_location(self.begins_from),
            config=job.config,
            options=learner_options(job.config, self.run),
            algorithm=f"{algorithm.__module__}:{algorithm.__qualname__}",
            gradient=job.algorithm.gradient(),
            content=job.content,
            collection=job.collection,
        )
        write_atomically(folder / ORDER, order.model_dump_json(), exact=True)

    def _find_finished_job(self, job: Job) -> FinishedJob | None:
        """Return the finished job if its version exists."""
        if job.number not in self.versions.numbers():
            return None
        finished = FinishedJob.read(self.versions, job.number)
        return finished if finished.job == job.name else None


def _with_absolute_location(version: ModelVersion) -> ModelVersion:
    """Return the version with an absolute folder path. Version 0 has no folder."""
    if not version.number:
        return version
    return version.model_copy(update={"location": str(Path(version.location).absolute())})


class _Reporter(JobListener):
    """A listener that writes the job's progress for the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.progress = JobProgress()

    def went_back(self, step: int, damage: Sequence[str]) -> None:
        on = f"it continued from step {step}" if step else "it began anew"
        self.progress.note = f"a checkpoint of the job was damaged: {'; '.join(damage)}; {on}"

    def started(self, done: int) -> None:
        _LOG.info("begins after %d steps", done)

    def stepped(self, step: Step, metrics: Mapping[str, float]) -> None:
        self.progress.step, self.progress.of, self.progress.metrics = step.number, step.of, dict(metrics)
        self.progress.write(self._folder)


def _learn(folder: Path, member: TeamMember) -> None:
    member.require_shared()
    order = JobSpec.model_validate_json((folder / ORDER).read_text(encoding="utf-8"))
    with join_team(order.device, PEER_SECONDS, shards=order.config.shard_training) as team:
        lock = member.lock(team)
        try:
            _train(order, folder, team)
        finally:
            lock.release()


def _fail(folder: Path, error: Exception) -> None:
    if isinstance(error, RuntimeError):
        error = training_error(error)
    words = str(error) if isinstance(error, EtudeError) else f"training failed: {error_words(error)}"
    note_failure(folder, words)


def _train(order: JobSpec, folder: Path, team: Team) -> None:
    """Train from the newest checkpoint, and write the version."""
    # The algorithm's module may be a user's file in the current folder.
    load_entry_points()
    make_importable(Path.cwd())
    algorithm: Algorithm = import_object(order.algorithm).model_validate(order.gradient)
    versions, data = StateFolders(order.versions, "v", "version"), order.collection
    policy = _policy(order, team)
    groups = units_of_collection(data, algorithm, policy.template)
    job = Job(order.job, algorithm, order.config, data, groups, order.content, order.seed, order.number)
    learner = Learner(policy, order.options, team)
    begins_from = 0 if order.begins_from is None else order.begins_from.number
    if order.start.number > begins_from:
        learner.restore(versions.folder(order.start.number))
    checkpoints = StateFolders(folder, "step-", "checkpoint")
    reporter = _Reporter(folder)
    with stop_events() as (canceled, stopping):
        made = job.train(learner, reporter, canceled, stopping, checkpoints)
        if team.leads:
            reporter.progress.note = learner.note or reporter.progress.note
            reporter.progress.write(folder)
            made.write(versions)


def _policy(order: JobSpec, team: Team) -> Policy:
    """Load the policy with the weights that the job starts from.

    Raises EngineError if this node's model differs from the run's.
    """
    loading = loading_options(team, order.device, order.dtype)
    policy = Policy.load(order.model, device=loading["device"], dtype=loading["dtype"])
    if (lora := order.config.lora) is not None:
        policy.use_lora(LoraOptions(**lora.model_dump()), fold(order.seed, "lora"))
    policy.keep_base()
    if order.begins_from is not None:
        policy.begin_from(order.begins_from)
    policy.adopt(order.start)
    return policy


def main(member: TeamMember, name: str) -> int:
    """Do this process's part of the job in the folder `name`. Return the exit code."""
    set_up_process()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    folder = Path(name)
    return 0 if do_part(name, partial(_learn, folder, member), partial(_fail, folder)) else 1
