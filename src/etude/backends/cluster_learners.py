"""Training on a cluster's nodes: the run's process starts a team for each job, and adopts its version."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from asyncio.subprocess import DEVNULL, Process
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from etude.backends.learning import JobNews, LearningOrder
from etude.backends.local_config import LoraConfig
from etude.backends.local_job import FinishedJob, Job, learner_options
from etude.config.finetuning import FinetuneConfig
from etude.core.errors import TrainingError
from etude.core.job import ModelVersion
from etude.core.keys import content_hash
from etude.inference.child_process import MaskedLog, guard_of, last_lines
from etude.jobs.content import JobContent
from etude.jobs.folders import StateFolders
from etude.learner.launch import Launcher, exit_words
from etude.learner.learner import TrainingCanceled
from etude.models.device import dtype_name
from etude.models.policy import Policy
from etude.models.source import local_path
from etude.store.files import private_folder

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

    launcher: Launcher
    count: int
    folder: Path
    """Of the run: the jobs that are not done yet, and the log."""
    device: str
    """The one that the config names for the model."""
    turn: asyncio.Lock
    """Held by the job that trains: one has room at a time."""


class ClusterLearners:
    """A workplace on other machines, which see the run folder at the same path.

    Whatever ends a team early, the next one goes on from the job's last checkpoint, also after the run's own
    process was killed: a guard ends what belonged to it.
    """

    def __init__(
        self,
        learners: Learners,
        policy: Policy,
        versions: StateFolders,
        seed: int,
        run: FinetuneConfig,
        lora: LoraConfig | None,
    ) -> None:
        self._learners = learners
        self._policy = policy
        self._versions = versions
        self._seed = seed
        self._run = run
        self._lora = lora
        self._begins_from: ModelVersion | None = None
        self.note: str | None = None

    def go_to(self, number: int) -> None:
        """The processes take the optimiser's state from the folder of the version that they start from."""

    def begin_from(self, version: ModelVersion) -> None:
        """Jobs that start from that version get no optimiser's state."""
        self._begins_from = version

    async def train(self, job: Job, start: ModelVersion, number: int) -> FinishedJob:
        """Have teams at the job, one after another, until one has made its version."""
        content = replace(job.content, start=str(start.number))
        name = content_hash([job.name, asdict(content), start.digest])
        folder = self._learners.folder / f"job-{name}"
        async with self._learners.turn:
            await asyncio.to_thread(self._prepare, folder, job, content, start, number)
            finished = await self._attempts(job, folder, number)
        await asyncio.to_thread(self._policy.adopt, finished.version)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return finished

    async def _attempts(self, job: Job, folder: Path, number: int) -> FinishedJob:
        """Raises TrainingError with the cause of a failed job, and of one that several teams have lost."""
        checkpoints, news = StateFolders(folder, "step-", "checkpoint"), JobNews(folder)
        attempts, newest = 0, checkpoints.newest()
        while True:
            cause = await self._work(job, folder, news)
            if (made := self._made(job.name, number)) is not None:
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

    async def _work(self, job: Job, folder: Path, news: JobNews) -> str:
        """Start a team and wait for its end; why it ended, where it has not done its part."""
        learners = self._learners
        command = learners.launcher.command(_MODULE, [str(folder)], learners.count, learners.folder)
        with MaskedLog(self._log) as log:
            team = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=log.fileno(), stderr=log.fileno(), start_new_session=True
            )
        guard = await guard_of(team.pid)
        try:
            code = await _end_of(team, job, news)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(team.pid, signal.SIGKILL)
            await team.wait()
            with contextlib.suppress(ProcessLookupError):
                guard.kill()
            await guard.wait()
        await log.settled()
        text = self._log.read_bytes()[log.begin :].decode(errors="replace")
        return learners.launcher.first_failure(text) or exit_words(code)

    @property
    def _log(self) -> Path:
        return self._learners.folder / "learners.log"

    def _prepare(self, folder: Path, job: Job, content: JobContent, start: ModelVersion, number: int) -> None:
        """Write the order of a job, and delete what is left of others."""
        for other in self._learners.folder.glob("job-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        private_folder(folder)
        JobNews(folder).clear()
        source, algorithm = local_path(self._policy.source), type(job.algorithm)
        order = LearningOrder(
            job=job.name,
            number=number,
            versions=self._versions.folder(0).parent.absolute(),
            model=self._policy.source if source is None else str(source.absolute()),
            device=self._learners.device,
            dtype=dtype_name(next(self._policy.model.parameters()).dtype),
            lora=self._lora,
            seed=self._seed,
            start=_located(start),
            begins_from=self._begins_from and _located(self._begins_from),
            config=job.config,
            options=learner_options(job.config, self._run),
            algorithm=f"{algorithm.__module__}:{algorithm.__qualname__}",
            gradient=job.algorithm.gradient(),
            content=content,
        )
        order.write(folder, job.collection)

    def _made(self, job: str, number: int) -> FinishedJob | None:
        """The job by its version, once that is there."""
        if number not in self._versions.numbers():
            return None
        facts = self._versions.facts(number)
        if facts["job"] != job:
            return None
        version = ModelVersion.model_validate(facts["version"])
        return FinishedJob(version, facts["metrics"], JobContent(**facts["content"]))


def _located(version: ModelVersion) -> ModelVersion:
    """The version by the whole path of its folder; version 0 has none."""
    if not version.number:
        return version
    return version.model_copy(update={"location": str(Path(version.location).absolute())})


async def _end_of(team: Process, job: Job, news: JobNews) -> int:
    """Wait for the end of a team, and ask it for one when its job is canceled; its exit code."""
    ending, deadline = asyncio.ensure_future(team.wait()), None
    clock = asyncio.get_running_loop()
    while not ending.done():
        await asyncio.wait({ending}, timeout=_LOOK_SECONDS)
        news.tell(job)
        if job.canceled.is_set() and deadline is None:
            deadline = clock.time() + _GRACE_SECONDS
            with contextlib.suppress(ProcessLookupError):
                team.terminate()
        if deadline is not None and clock.time() > deadline:
            with contextlib.suppress(ProcessLookupError):
                team.kill()
    return ending.result()
