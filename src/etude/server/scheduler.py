"""The scheduler takes jobs from the queue. Processes train each, and it records what they report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from etude.algorithms.algorithm import load_algorithms
from etude.backends.job_rows import units_of_rows
from etude.backends.job_training import JobData, JobTraining, News
from etude.backends.job_worker import ForkedProcess, JobFolder, JobOrder, ProcessJob, program
from etude.backends.lm_server import FREE_ENGINE
from etude.config.finetuning import LoraOptions
from etude.core.errors import TrainingError
from etude.core.keys import fold
from etude.core.sample import trained_tokens
from etude.core.training_rows import ROW_OF
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.optimiser import Schedule
from etude.learner.team import Team
from etude.models.source import local_path
from etude.models.weights import digest, save_tensors
from etude.processes.team import Places, TeamRun, local_places
from etude.server.database import Row
from etude.server.engines import JOBS, EnginePool
from etude.server.files import FileStore, read_rows
from etude.server.job_request import job_algorithm
from etude.server.jobs import JobStore, model_name
from etude.server.models import ModelStore, ServedModel, load_policy
from etude.server.settings import ServerSettings, training_processes
from etude.show.logs import show_logs
from etude.store.files import WEIGHTS_FILE, open_draft
from etude.wire.http_server import ApiError

_LOG = logging.getLogger("etude.server")
_LOOK_SECONDS = 0.5


class _ServerJob(ProcessJob):
    """A job of the server, whose events are in the database."""

    def __init__(self, scheduler: Scheduler, job: Row) -> None:
        settings = scheduler.workers_settings
        super().__init__(JobFolder(settings.data_dir / "jobs" / job["id"]), job["news_read"])
        self._scheduler, self._settings, self._id = scheduler, settings, str(job["id"])

    async def start(self) -> TeamRun | ForkedProcess:
        settings, folder = self._settings, self.folder
        if settings.training_processes == 1 and settings.on is None:
            return await ForkedProcess.start(ServerOrder, folder)
        started = program(ServerOrder, folder, folder.path)
        return TeamRun(self._scheduler.places, started, settings.training_processes or 1, folder.log)

    async def take_news(self, news: Sequence[News]) -> None:
        await asyncio.to_thread(self._scheduler.jobs.add_news, self._id, news, self.position)

    async def is_wanted(self) -> bool:
        if self._scheduler.is_stopping:
            return False
        job = await asyncio.to_thread(self._scheduler.jobs.get, self._id)
        return bool(job["status"] == "running")


class Scheduler:
    """The scheduler of up to `running_jobs` jobs. Everything that must survive it is in the database.

    If the server is killed, each process notices it and ends with a checkpoint after its current step. It
    holds its job's lock until it ends, so the next server waits for it before it starts another.
    """

    def __init__(
        self, settings: ServerSettings, jobs: JobStore, files: FileStore, models: ModelStore, pool: EnginePool
    ) -> None:
        self._settings = settings
        processes, data_dir = training_processes(settings), settings.data_dir.absolute()
        folder = local_path(settings.model)
        model = settings.model if folder is None else str(folder.absolute())
        self.workers_settings = replace(
            settings, model=model, data_dir=data_dir, training_processes=processes, api_key=None, vllm_arg=()
        )
        self.jobs, self._files, self._models = jobs, files, models
        self._pool = pool
        self.places: Places = local_places
        if (cluster := settings.cluster) is not None:
            from etude.processes.ray_cluster import ray_places

            # Workers import custom algorithms from the server's current folder.
            code = Path.cwd() if settings.algorithms else None
            self.places = partial(ray_places, config=cluster, on_gpus=settings.device != "cpu", code=code)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._engine_away_for: set[str] = set()
        """The jobs that stopped the engine, until it is back."""
        self.is_stopping = False
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take over the jobs of earlier servers, then process the queue."""
        self._loop = asyncio.get_running_loop()
        self._main = self._loop.create_task(self._run())

    def wake(self) -> None:
        """Look at the queue now. Can be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def stop(self) -> None:
        """Ask the processes to write checkpoints and end. The next server goes on with their jobs."""
        if self._main is not None:
            self._main.cancel()
        self.is_stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            try:
                for status in ("running", "queued"):
                    for job in await asyncio.to_thread(self.jobs.with_status, status):
                        await self._take(job)
                # The engine is back once no job needs the device.
                if self._engine_away_for and not self._engine_away_for & self._tasks.keys():
                    await self._pool.start(JOBS)
                    self._engine_away_for.clear()
            except Exception:  # noqa: BLE001  a full disk today must not end the queue for good
                _LOG.exception("the queue of jobs could not be read; the server will try again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5 * _LOOK_SECONDS):
                    await self._woken.wait()

    async def _take(self, job: Row) -> None:
        """Train a job unless it is trained already, or too many are."""
        name, is_new = job["id"], job["status"] == "queued"
        if name in self._tasks or len(self._tasks) >= self._settings.running_jobs:
            return
        if is_new and not await asyncio.to_thread(self.jobs.start, name):
            return
        if job["metadata"].get(FREE_ENGINE) == "true":
            self._engine_away_for.add(name)
            await self._pool.stop(JOBS)

        def handle_end(task: asyncio.Task[None]) -> None:
            del self._tasks[name]
            if task.cancelled() or task.exception() is None:
                self._woken.set()
            else:  # Its cause, such as a full disk, may last: the next look takes the job again.
                _LOG.error("the scheduler failed on job %s", name, exc_info=task.exception())

        self._tasks[name] = task = asyncio.ensure_future(self._train(job, is_new))
        task.add_done_callback(handle_end)

    async def _train(self, job: Row, is_new: bool) -> None:
        name, work, param = job["id"], _ServerJob(self, job), None
        try:
            # The processes of an earlier server end with a checkpoint after their step.
            while await asyncio.to_thread(work.folder.holders) and not self.is_stopping:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)  # Children of another server send no events.
            order = await asyncio.to_thread(self._order, job)
            await asyncio.to_thread(work.folder.write_order, order)
            end = await work.run("" if is_new else "the server was stopped")
        except ApiError as error:
            end, param = News(kind="failed", message=str(error.detail), code="invalid_request"), error.param
        except TrainingError as error:
            end = News(kind="failed", message=str(error), code="worker_crashed")
        if end is None and self.is_stopping:
            return  # The next server goes on with it.
        if end is not None and end.kind == "failed":
            await asyncio.to_thread(self.jobs.fail, name, end.message, end.code, param)
        elif end is not None:
            model = {
                "id": model_name(job["model"], job["suffix"], name),
                "created": time.time(),
                "job": name,
                # Relative, because the data folder may be moved.
                "folder": str(order.made.relative_to(self.workers_settings.data_dir)),
                "lora": order.lora and order.lora.model_dump(exclude_none=True),
                "digest": end.digest,
            }
            await asyncio.to_thread(self.jobs.succeed, name, model, end.trained_tokens)
        await asyncio.to_thread(work.folder.checkpoints.prune, ())

    def _order(self, job: Row) -> ServerOrder:
        """Return the order for a job's processes. Raises ApiError if its model or a file is gone."""
        settings, held_out = self.workers_settings, job["validation_file"]
        return ServerOrder(
            job=job["id"],
            device=settings.device,
            dtype=settings.dtype,
            shards=settings.shard_training,
            settings=settings,
            method=job["method"],
            values=job["hyperparameters"],
            seed=job["seed"],
            start=self._models.get(job["model"]),
            training_file=self._files.path(job["training_file"]).absolute(),
            validation_file=None if held_out is None else self._files.path(held_out).absolute(),
            made=settings.data_dir / "models" / job["id"],
        )


class ServerOrder(JobOrder):
    """The order of a server's job."""

    settings: ServerSettings
    """The server's settings, without its key and with the resolved number of training processes."""
    method: str
    values: dict[str, Any]
    """The job's hyperparameters."""
    seed: int
    start: ServedModel
    training_file: Path
    validation_file: Path | None
    made: Path
    """The folder of the new model."""

    @property
    def lora(self) -> LoraOptions | None:
        """The LoRA weights of the new model. None if the job trains all weights."""
        rank = self.values["lora_rank"]
        return LoraOptions(r=rank, alpha=self.values["lora_alpha"]) if rank else None

    def show_logs(self) -> None:
        show_logs(self.settings.log_level)
        _LOG.debug("order: %s", self.model_dump_json())

    def train(self, folder: JobFolder, team: Team, stopping: Event) -> None:
        """Train the job, and write its model.

        Raises TrainingError for rows that the model cannot take, and if no weight has changed.
        """
        load_algorithms(self.settings.algorithms)
        loading: dict[str, Any] = self.loading(team)
        values, algorithm = self.values, job_algorithm(self.method, self.values)
        settings = replace(self.settings, **loading)
        keeps_reference = "reference" in algorithm.needs()
        from_base = keeps_reference and values.get("reference") == "base"
        policy = load_policy(settings, self.start, keep_base=from_base)
        if self.lora is not None and self.start.lora is None:
            policy.use_lora(self.lora, fold(self.seed, "lora"))
        if keeps_reference:
            policy.keep_base()  # Unless the server's base model is the reference, the start model is.
        before = policy.digest()
        options = LearnerOptions(
            learning_rate=values["learning_rate"] * values["learning_rate_multiplier"],
            schedule=Schedule(values["lr_schedule"], values["warmup_steps"]),
            gradient_checkpointing=values["gradient_checkpointing"],
        )

        def read_units(file: Path | None) -> Sequence[Any]:
            rows: Any = () if file is None else read_rows(file, ROW_OF[algorithm.kind])
            return units_of_rows(rows, policy, algorithm)

        data = JobData(
            algorithm,
            read_units(self.training_file),
            read_units(self.validation_file),
            passes=values["n_epochs"],
            batch_size=values["batch_size"],
            seed=self.seed,
            key=("epoch",),
        )
        learner, steps = Learner(policy, options, team), settings.checkpoint_steps
        training = JobTraining(learner, data, folder.add_news, folder.checkpoints, steps)
        training.run(Event(), stopping)
        weights = team.whole(policy.trainable())
        if not team.leads:
            return
        with open_draft(self.made) as draft:
            draft.mkdir(parents=True)
            save_tensors(weights, draft / WEIGHTS_FILE)
            if (made := digest(weights)) == before:
                raise TrainingError(
                    "training changed no weight: no row has a gradient (equal answers of a pair have none), "
                    "or learning_rate_multiplier is too small"
                )
        tokens = sum(trained_tokens(data.rows[row]) for step in training.steps for row in step.rows)
        folder.add_news(News(kind="done", digest=made, trained_tokens=tokens))
