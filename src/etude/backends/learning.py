"""Training on a cluster's nodes: the run's process starts a team for each job, and adopts its version.

The run writes an order into the job's folder, and each process of the team tells the run how the job goes.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.algorithms.algorithm import Algorithm
from etude.backends.local_job import (
    ORDER,
    FinishedJob,
    Job,
    JobNews,
    LearningOrder,
    failure,
    learner_options,
)
from etude.cluster.launch import HeadLost, Seat
from etude.config.finetuning import FinetuneConfig
from etude.config.import_path import import_object, make_importable
from etude.config.registry import load_entry_points
from etude.core.errors import EtudeError, StoreError, TrainingError, words_of
from etude.core.job import ModelVersion
from etude.core.keys import content_hash, fold
from etude.core.process import set_up_process
from etude.inference.child_process import TeamLauncher, exit_words, last_lines
from etude.inference.programs import Child, Command, LocalLauncher
from etude.jobs.folders import StateFolders, data_hash
from etude.jobs.training import (
    PEER_SECONDS,
    Interrupted,
    JobListener,
    asked_to_end,
    loading_of,
    units_of_collection,
)
from etude.learner.learner import Learner, TrainingCanceled
from etude.learner.optimiser import Step
from etude.learner.team import PeerLost, Team, joined
from etude.models.device import dtype_name
from etude.models.policy import LoraOptions, Policy
from etude.models.source import local_path
from etude.store.files import private_folder, write_atomically

_LOG = logging.getLogger("etude.learners")
_MODULE = "etude.backends.learning"
_ATTEMPTS = 3
"""Teams that may end without a checkpoint before their job has failed."""
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 20.0
"""For a team to make a checkpoint and end once its job is canceled."""


@dataclass(frozen=True, slots=True)
class Learners:
    """The processes of a cluster that train for a run."""

    launcher: TeamLauncher
    count: int
    folder: Path
    """Of the run: the jobs that are not done yet, and the log."""
    device: str
    """The one that the config names for the model."""
    turn: asyncio.Lock
    """Held by the job that trains: one has room at a time."""


@dataclass(slots=True)
class ClusterLearners:
    """A workplace on other machines, which see the run folder at the same path.

    Whatever ends a team early, the next one goes on from the job's last checkpoint, also after the run's own
    process was killed: a guard ends what belonged to it.
    """

    learners: Learners
    policy: Policy
    versions: StateFolders
    run: FinetuneConfig
    begins_from: ModelVersion | None = None
    """The version that a warm-up made, which training begins with."""
    note: str | None = None
    """Something that a person should know of the last job."""

    def keep(self) -> None:
        """Each version is on the disk when its job is over."""

    def close(self) -> None:
        """There is nothing here to be freed."""

    def go_to(self, number: int) -> None:
        """The processes take the optimiser's state from the folder of the version that they start from."""

    def begin_from(self, version: ModelVersion) -> None:
        """Jobs that start from that version get no optimiser's state."""
        self.begins_from = version

    async def train(self, job: Job, start: ModelVersion) -> FinishedJob:
        """Have teams at the job, one after another, until one has made its version."""
        name = content_hash([job.name, asdict(job.content), start.digest])
        folder = self.learners.folder / f"job-{name}"
        async with self.learners.turn:
            await asyncio.to_thread(self._prepare, folder, job, start)
            finished = await self._attempts(job, folder)
        await asyncio.to_thread(self.policy.adopt, finished.version)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return finished

    async def _attempts(self, job: Job, folder: Path) -> FinishedJob:
        """Raises TrainingError with the cause of a failed job, and of one that several teams have lost."""
        checkpoints = StateFolders(folder, "step-", "checkpoint")
        attempts, newest = 0, checkpoints.newest()
        while True:
            cause = await self._work(job, folder)
            news = JobNews.read(folder)
            if (made := self._made(job)) is not None:
                self.note = news.note
                return made
            if news.failure is not None:
                raise TrainingError(news.failure)
            if job.canceled.is_set():
                raise TrainingCanceled(f"canceled after {news.step} steps")
            step = checkpoints.newest()
            attempts, newest = 1 if step > newest else attempts + 1, step
            if attempts == _ATTEMPTS:
                lines = last_lines(self._log, 5).replace("\n", " | ")
                raise TrainingError(
                    f"its learners ended {attempts} times without a checkpoint ({cause}); see {self._log}: "
                    f"{lines}"
                )
            goes_on = f"goes on from step {step}" if step else "begins anew"
            job.news = f"its learners ended early ({cause}); the job {goes_on}"
            _LOG.warning("job %s: %s", job.name, job.news)

    async def _work(self, job: Job, folder: Path) -> str:
        """Start a team and wait for its end; why it ended, where it has not done its part."""
        learners = self.learners
        words = learners.launcher.command(_MODULE, [str(folder)], learners.count, learners.folder)
        team = await LocalLauncher().launch(Command(tuple(words)), self._log)
        try:
            code = await _end_of(team, job, folder)
        finally:
            await team.end(0.0)
        text = self._log.read_bytes()[team.begin :].decode(errors="replace")
        return learners.launcher.first_failure(text) or exit_words(code)

    @property
    def _log(self) -> Path:
        return self.learners.folder / "learners.log"

    def _prepare(self, folder: Path, job: Job, start: ModelVersion) -> None:
        """Write the order of a job, and delete what is left of others."""
        for other in self.learners.folder.glob("job-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        private_folder(folder)
        JobNews().write(folder)  # Nothing of an earlier attempt.
        source, algorithm = local_path(self.policy.source), type(job.algorithm)
        order = LearningOrder(
            job=job.name,
            number=job.number,
            versions=self.versions.folder(0).parent.absolute(),
            model=self.policy.source if source is None else str(source.absolute()),
            device=self.learners.device,
            dtype=dtype_name(next(self.policy.model.parameters()).dtype),
            seed=job.seed,
            start=_located(start),
            begins_from=self.begins_from and _located(self.begins_from),
            config=job.config,
            options=learner_options(job.config, self.run),
            algorithm=f"{algorithm.__module__}:{algorithm.__qualname__}",
            gradient=job.algorithm.gradient(),
            content=job.content,
            collection=job.collection,
        )
        write_atomically(folder / ORDER, order.model_dump_json(), exact=True)

    def _made(self, job: Job) -> FinishedJob | None:
        """The job by its version, once that is there."""
        if job.number not in self.versions.numbers():
            return None
        finished = FinishedJob.read(self.versions, job.number)
        return finished if finished.job == job.name else None


def _located(version: ModelVersion) -> ModelVersion:
    """The version by the whole path of its folder; version 0 has none."""
    if not version.number:
        return version
    return version.model_copy(update={"location": str(Path(version.location).absolute())})


async def _end_of(team: Child, job: Job, folder: Path) -> int:
    """Wait for the end of a team, and ask it for one when its job is canceled; its exit code."""
    ending = asyncio.ensure_future(team.ended())
    asked: asyncio.Future[None] | None = None
    while not ending.done():
        await asyncio.wait({ending}, timeout=_LOOK_SECONDS)
        if (news := JobNews.read(folder)).of:
            job.metrics, job.progress = news.metrics, 100.0 * news.step / news.of
        if job.canceled.is_set() and asked is None:
            asked = asyncio.ensure_future(team.end(_GRACE_SECONDS))
    return ending.result().code or 0


class _Reporter(JobListener):
    """Tells the run how the job goes."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def went_back(self, step: int, damage: Sequence[str]) -> None:
        on = f"it went on from step {step}" if step else "it began anew"
        self._seat.call("tell", note=f"a checkpoint of the job was damaged: {'; '.join(damage)}; {on}")

    def started(self, done: int) -> None:
        _LOG.info("begins after %d steps", done)

    def stepped(self, step: Step, metrics: Mapping[str, float]) -> None:
        self._seat.call("tell", step=step.number, of=step.of, metrics=dict(metrics))


def learn(folder: Path, seat: Seat) -> bool:
    """Do this process's part of the job in `folder`; whether that is done.

    A job that would fail again has failed: the run is told why. Raises PeerLost and HeadLost.
    """
    try:
        seat.require_shared()
        order = LearningOrder.model_validate_json((folder / ORDER).read_text(encoding="utf-8"))
        if data_hash(order.collection) != order.content.data:
            raise StoreError(f"{folder} has other data than the run has written there")
        with joined(order.device, PEER_SECONDS, shards=order.config.shard_training) as team:
            lock = seat.lock(team)
            try:
                _train(order, folder, team, seat)
            finally:
                lock.release()
        return True
    except (Interrupted, TrainingCanceled) as reason:
        _LOG.warning("job in %s: %s", folder, type(reason).__name__)
        return True
    except (PeerLost, HeadLost):
        raise
    except EtudeError as error:
        seat.call("tell", failure=str(error))
    except RuntimeError as error:
        seat.call("tell", failure=str(failure(error)))
    except Exception as error:  # noqa: BLE001  trying again would end the same way, whatever it was
        _LOG.exception("job in %s", folder)
        seat.call("tell", failure=f"training failed: {words_of(error)}")
    return False


def _train(order: LearningOrder, folder: Path, team: Team, seat: Seat) -> None:
    """Train from the newest checkpoint on, and write the version."""
    # The algorithm's module may be one of the user's in the current folder.
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
    with asked_to_end(seat) as (canceled, stopping):
        made = job.train(learner, _Reporter(seat), canceled, stopping, checkpoints)
        if team.leads:
            made.write(versions)
    if team.leads and learner.note is not None:
        seat.call("tell", note=learner.note)


def _policy(order: LearningOrder, team: Team) -> Policy:
    """The policy with the weights that the job starts from.

    Raises EngineError where the model of this node is not that of the run.
    """
    loading = loading_of(team, order.device, order.dtype)
    policy = Policy.load(order.model, device=loading["device"], dtype=loading["dtype"])
    if (lora := order.config.lora) is not None:
        policy.use_lora(LoraOptions(**lora.model_dump()), fold(order.seed, "lora"))
    policy.keep_base()
    if order.begins_from is not None:
        policy.begin_from(order.begins_from)
    policy.adopt(order.start)
    return policy


def main(seat: Seat, folder: str) -> int:
    """Do the part of the process that has that place; the exit code."""
    set_up_process()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return 0 if learn(Path(folder), seat) else 1
    except (PeerLost, HeadLost) as error:
        # The job goes on from its last checkpoint, with new processes.
        _LOG.error("job in %s: %s", folder, error)
        return 1
