"""Jobs of the adapter `local` that processes on the nodes of a cluster train."""

import asyncio
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from etude.algorithms.algorithm import Algorithm, read_groups
from etude.backends.job_training import FinishedJob, Job, News, learner_options
from etude.backends.job_worker import JobFolder, JobOrder, ProcessJob, program
from etude.backends.state_folders import JobContent, StateFolders
from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.config.import_path import class_path, import_object, make_importable
from etude.config.registry import load_entry_points
from etude.core.errors import TrainingError
from etude.core.job import ModelVersion
from etude.core.keys import content_hash, fold
from etude.core.sample import TrajectoryCollection
from etude.learner.learner import Learner, LearnerOptions, TrainingCanceled
from etude.learner.team import Team
from etude.models.device import dtype_name
from etude.models.policy import Policy
from etude.models.source import local_path
from etude.processes.pool import Cluster
from etude.processes.team import TeamRun

_LOG = logging.getLogger("etude.learners")


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

    A job also resumes from its last checkpoint after a kill of the run's own process, which ends its team.
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
        """Train the job in processes. Raises TrainingError with its cause if it fails, TrainingCanceled."""
        learners, name = self.learners, content_hash([job.name, asdict(job.content), start.digest])
        folder = JobFolder(learners.folder / f"job-{name}", learners.folder / "learners.log")
        async with learners.cluster.turn:
            await asyncio.to_thread(self._prepare, folder, job, start)
            trained = _ClusterJob(folder, job, learners)
            try:
                end = await trained.run()
            finally:
                learners.cluster.teams.clear()
        if end is None:
            raise TrainingCanceled(f"canceled after {trained.step} steps")
        if end.kind == "failed":
            raise TrainingError(end.message)
        self.note = end.message or trained.note
        finished = FinishedJob.model_validate(self.versions.facts(job.number))
        await asyncio.to_thread(self.policy.adopt, finished.version)
        await asyncio.to_thread(shutil.rmtree, folder.path, ignore_errors=True)
        return finished

    def _prepare(self, folder: JobFolder, job: Job, start: ModelVersion) -> None:
        """Write the order of a job. Delete its old news, and the folders of other jobs."""
        for other in self.learners.folder.glob("job-*"):
            if other != folder.path:
                shutil.rmtree(other, ignore_errors=True)
        folder.news.unlink(missing_ok=True)
        source = local_path(self.policy.source)
        order = ClusterOrder(
            job=job.name,
            number=job.number,
            versions=self.versions.root.absolute(),
            model=self.policy.source if source is None else str(source.absolute()),
            device=self.learners.device,
            dtype=dtype_name(next(self.policy.model.parameters()).dtype),
            shards=job.config.shard_training,
            seed=job.seed,
            start=_with_absolute_location(start),
            begins_from=self.begins_from and _with_absolute_location(self.begins_from),
            config=job.config,
            options=learner_options(job.config, self.run),
            algorithm=class_path(type(job.algorithm)),
            algorithm_options=job.algorithm.model_dump(mode="json", exclude_unset=True),
            content=job.content,
            collection=job.collection,
        )
        folder.write_order(order)


def _with_absolute_location(version: ModelVersion) -> ModelVersion:
    """Return the version with an absolute folder path. Version 0 has no folder."""
    if not version.number:
        return version
    return version.model_copy(update={"location": str(Path(version.location).absolute())})


class _ClusterJob(ProcessJob):
    """A job of a run on the nodes of a cluster."""

    def __init__(self, folder: JobFolder, job: Job, learners: Learners) -> None:
        super().__init__(folder)
        self._job, self._learners = job, learners
        self.step = 0
        self.note: str | None = None

    async def start(self) -> TeamRun:
        cluster, device = self._learners.cluster, self._learners.device
        assert cluster.learners is not None
        places = partial(cluster.learners, on_gpus=device != "cpu")
        started = program(ClusterOrder, self.folder, self._learners.folder)
        team = TeamRun(places, started, self._learners.count, self.folder.log)
        cluster.teams.clear()
        cluster.teams.add(team)
        return team

    async def take_news(self, news: Sequence[News]) -> None:
        job = self._job
        for each in news:
            match each.kind:
                case "stepped":
                    self.step = each.step
                    job.take(each)
                case "went_back":
                    self.note = f"a checkpoint of the job was damaged: {each.message}; the job {each.goes_on}"
                case "ended":
                    job.news = f"its processes ended early ({each.message}); the job {each.goes_on}"
                    _LOG.warning("job %s: %s", job.name, job.news)

    async def is_wanted(self) -> bool:
        return not self._job.canceled.is_set()


class ClusterOrder(JobOrder):
    """The order of a run's job."""

    number: int
    """The number of the version that it makes."""
    versions: Path
    """The folder of all versions."""
    model: str
    seed: int
    start: ModelVersion
    begins_from: ModelVersion | None
    """The version that a warm-up made, which training starts from instead of the base model."""
    config: LocalAdapterConfig
    options: LearnerOptions
    algorithm: str
    """The import path of the algorithm's class."""
    algorithm_options: dict[str, Any]
    content: JobContent
    collection: TrajectoryCollection

    def train(self, folder: JobFolder, team: Team, stopping: Event) -> None:
        """Train the job, and write its version."""
        # The algorithm's module may be a user's file in the current folder.
        load_entry_points()
        make_importable(Path.cwd())
        algorithm: Algorithm = import_object(self.algorithm).model_validate(self.algorithm_options)
        versions, data = StateFolders(self.versions, "v", "version"), self.collection
        policy = self._policy(team)
        groups = read_groups(data.groups, algorithm, policy.template.encoder)
        job = Job(self.job, algorithm, self.config, data, groups, self.content, self.seed, self.number)
        learner = Learner(policy, self.options, team)
        begins_from = 0 if self.begins_from is None else self.begins_from.number
        if self.start.number > begins_from:
            learner.restore(versions.folder(self.start.number))
        made = job.train(learner, folder.add_news, job.canceled, stopping, folder.checkpoints)
        if team.leads:
            versions.write(made.number, made.facts, made.state)
            folder.add_news(News(kind="done", message=learner.note or ""))

    def _policy(self, team: Team) -> Policy:
        """Load the policy with the weights that the job starts from.

        Raises EngineError if this node's model differs from the run's.
        """
        loading = self.loading(team)
        policy = Policy.load(self.model, device=loading["device"], dtype=loading["dtype"])
        if (lora := self.config.lora) is not None:
            policy.use_lora(lora, fold(self.seed, "lora"))
        policy.keep_base()
        if self.begins_from is not None:
            policy.begin_from(self.begins_from)
        policy.adopt(self.start)
        return policy
