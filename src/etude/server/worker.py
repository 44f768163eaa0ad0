"""The worker: one or more processes that train a job of the database, from its file to a new model."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, cast

from torch import Tensor

from etude.algorithms.algorithm import load_algorithms
from etude.backends.job_training import (
    PEER_SECONDS,
    JobData,
    JobListener,
    JobTraining,
    TooLittleMemory,
    do_part,
    loading_options,
    stop_events,
    units_of_rows,
)
from etude.backends.job_training import Row as UnitRow
from etude.core.errors import EtudeError, StoreError, TrainingError
from etude.core.job import ModelVersion
from etude.core.process import set_up_process
from etude.core.training_rows import ROW_OF
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.optimiser import Schedule, Step
from etude.learner.team import Team, join_team
from etude.models.weights import save_tensors
from etude.processes.team import TeamMember
from etude.server.database import Row, open_database
from etude.server.files import FileStore, read_rows
from etude.server.hyperparameters import job_algorithm
from etude.server.jobs import FINAL, JobFolder, JobStore, model_name
from etude.server.models import ModelStore, load_policy_of_job
from etude.server.settings import ServerSettings, WorkerOrder
from etude.show.logs import show_logs
from etude.store.files import SERVER_DATABASE, WEIGHTS_FILE, open_draft, open_private
from etude.store.run_folder import RunLock
from etude.wire.http_server import ApiError

_LOG = logging.getLogger("etude.server.worker")
_ALONE_SECONDS = 60.0
"""Seconds for a worker to end with a checkpoint after its server has ended."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The server's database and folders."""

    jobs: JobStore
    files: FileStore
    models: ModelStore


def open_stores(settings: ServerSettings) -> Stores:
    """Return the stores of a server. They stay open until this process ends.

    Raises StoreError if the database cannot be opened.
    """
    database = open_database(settings.data_dir / SERVER_DATABASE)
    models = ModelStore(database, settings.data_dir, settings.name)
    return Stores(JobStore(database), FileStore(database, settings.data_dir), models)


class _Remote:
    """A store at the head of a cluster. Its methods raise HeadLost."""

    def __init__(self, member: TeamMember, store: str) -> None:
        self._member, self._store = member, store

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._member.call, f"{self._store}.{method}")


def work(order: WorkerOrder, member: TeamMember | None = None) -> bool:
    """Train the job, alone or as a `member` of its team. Return whether this process did its part."""
    settings = order.settings
    load_algorithms(settings.algorithms)
    if member is not None and member.has_desk:
        stores = Stores(*(cast("Any", _Remote(member, store)) for store in ("jobs", "files", "models")))
    else:
        stores = open_stores(settings)
    together: AbstractContextManager[Team] = nullcontext(Team())
    if member is not None:
        together = join_team(settings.device, PEER_SECONDS, shards=settings.shard_training)

    def train() -> None:
        with together as team:
            run_order(order, team, stores, member)

    return do_part(order.job, train, partial(_fail, stores.jobs, order.job))


def run_order(order: WorkerOrder, team: Team, stores: Stores, member: TeamMember | None) -> None:
    """Train the job, unless another worker does. The result is in the database. Raises as `train_job`."""
    settings, jobs = order.settings, stores.jobs
    lock: RunLock | None = None
    if member is None:
        with suppress(StoreError):
            lock = RunLock(JobFolder(settings.data_dir, order.job).path / "lock")
    else:
        member.require_shared()
        lock = member.lock(team)

    def look(canceled: Event, stopping: Event) -> None:
        """Check whether the job was cancelled or paused."""
        status = jobs.get(order.job)["status"]
        if status in FINAL:
            canceled.set()
        elif status != "running":
            stopping.set()

    try:
        if lock is not None and team.any(team.leads and jobs.get(order.job)["status"] == "running"):
            settings = settings.model_copy(update=loading_options(team, settings.device, settings.dtype))
            with stop_events(look) as (canceled, stopping):
                train_job(settings, jobs.get(order.job), stores, team, canceled, stopping)
    finally:
        if lock is not None:
            lock.release()


def _fail(jobs: JobStore, job: str, error: Exception) -> None:
    match error:
        case ApiError():
            jobs.fail(job, str(error.detail), "invalid_request", error.param)
        case TooLittleMemory():
            jobs.fail(job, str(error), "insufficient_memory")
        case EtudeError():
            jobs.fail(job, str(error), "training_failed")
        case _:
            first = (str(error).strip() or "no message").splitlines()[0]
            jobs.fail(job, f"{type(error).__name__}: {first}", "training_failed")


def _exit_with_server() -> None:
    """Send this process SIGTERM when the server has ended. Send SIGKILL if it then takes too long."""
    server = multiprocessing.parent_process()
    assert server is not None

    def watch() -> None:
        server.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ALONE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="etude-server-watch", daemon=True).start()


def train_forked(text: str) -> None:
    """Run an order, as JSON, in this new process of the server. Its output goes to the job's log."""
    os.setsid()
    order = WorkerOrder.model_validate_json(text)
    _exit_with_server()
    with open_private(JobFolder(order.settings.data_dir, order.job).log, "ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    sys.exit(_run(order, None))


def main(member: TeamMember, text: str) -> int:
    """Run an order, as JSON, as a member of its team. Return the exit code."""
    return _run(WorkerOrder.model_validate_json(text), member)


def _run(order: WorkerOrder, member: TeamMember | None) -> int:
    set_up_process()
    show_logs(order.settings.log_level)
    _LOG.debug("order: %s", order.model_dump_json())
    return 0 if work(order, member) else 1


KEPT_CHECKPOINTS = 3
"""The number of a job's checkpoints that clients can call as models, from its last epochs."""

_COLUMNS = ("loss", "learning_rate", "tokens_per_s", "valid_loss")
_HEADER = "step,train_loss,learning_rate,tokens_per_s,valid_loss\n"


def train_job(
    settings: ServerSettings, job: Row, stores: Stores, team: Team, canceled: Event, stopping: Event
) -> None:
    """Train a job from its newest checkpoint, and make its model. All processes of the team call this.

    Raises TrainingError for rows that the model cannot take, and ApiError if a model or file is gone. Raises
    TrainingCanceled when `canceled` is set. Raises Interrupted, after a checkpoint, when `stopping` is set.
    """
    values: Mapping[str, Any] = job["hyperparameters"]
    algorithm = job_algorithm(job["method"], values)
    keeps_reference = "reference" in algorithm.needs()
    policy = load_policy_of_job(settings, job, stores.models.get(job["model"]), keeps_reference)
    before = policy.digest()
    options = LearnerOptions(
        learning_rate=values["learning_rate"] * values["learning_rate_multiplier"],
        schedule=Schedule(values["lr_schedule"], values["warmup_steps"]),
        gradient_checkpointing=values["gradient_checkpointing"],
    )
    reporter = _Reporter(job, stores, settings.data_dir)
    checkpoints = JobFolder(settings.data_dir, job["id"]).checkpoints

    def read_units(file: str | None) -> Sequence[UnitRow]:
        if not file:
            return []
        rows: Any = read_rows(stores.files.path(file), ROW_OF[algorithm.kind])
        return units_of_rows(rows, policy, algorithm)

    data = JobData(
        algorithm,
        read_units(job["training_file"]),
        read_units(job["validation_file"]),
        passes=values["n_epochs"],
        batch_size=values["batch_size"],
        seed=job["seed"],
        key=("epoch",),
    )
    learner = Learner(policy, options, team)
    training = JobTraining(learner, data, reporter, checkpoints, settings.checkpoint_steps)
    training.run(canceled, stopping)
    weights = team.whole(policy.trainable())
    if team.leads:
        reporter.finish(weights, before, training.history, data.trained(training))


class _Reporter(JobListener):
    """A listener that writes a job's events, model checkpoints and end to the database."""

    def __init__(self, job: Row, stores: Stores, data_dir: Path) -> None:
        self._job = job
        self._id = str(job["id"])
        self._jobs = stores.jobs
        self._files = stores.files
        self._data_dir = data_dir
        self._clock = (time.time(), 0)
        """When this worker began, and the number of steps done before."""

    def went_back(self, step: int, damage: Sequence[str]) -> None:
        on = f"the job continues from step {step}" if step else "the job begins anew"
        self._jobs.add_event(self._id, f"A checkpoint is damaged: {'; '.join(damage)}; {on}", level="warn")

    def started(self, done: int) -> None:
        self._clock = (time.time(), done)
        resumed = f", from step {done}" if done else ""
        self._jobs.add_event(self._id, f"Fine-tuning job started{resumed}", once=f"started {done}")

    def stepped(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Add an event, and update the estimated end of the job."""
        loss = metrics.get("loss", math.nan)
        message = f"Step {step.number}/{step.of}: training loss={loss:.4f}"
        if "valid_loss" in metrics:
            message += f", validation loss={metrics['valid_loss']:.4f}"
        progress = {"step": step.number, "total_steps": step.of, "epoch": step.epoch, "train_loss": loss}
        data = _finite(progress | {**metrics})
        self._jobs.add_event(self._id, message, once=f"step {step.number}", data=data)
        began, done = self._clock
        left = (time.time() - began) / (step.number - done) * (step.of - step.number)
        self._jobs.set(self._id, estimated_finish=time.time() + left)

    def checkpointed(
        self, step: Step, version: ModelVersion, metrics: Mapping[str, float]
    ) -> Collection[int]:
        """Make the checkpoint callable as a model if it ends an epoch."""
        if step.ends_epoch:
            finite = _finite(metrics)
            shown = {"step": step.number, "train_loss": finite.get("loss")}
            if "valid_loss" in finite:
                shown |= {"valid_loss": finite["valid_loss"], "full_valid_loss": finite["valid_loss"]}
            model = self._model(Path(version.location), version.digest, step.number)
            self._jobs.add_checkpoint(self._id, model | {"metrics": shown}, KEPT_CHECKPOINTS)
            event = f"Checkpoint created at step {step.number}"
            self._jobs.add_event(self._id, event, once=f"checkpoint {step.number}")
        self._jobs.set(self._id, attempts=0)
        rows, _ = self._jobs.checkpoints(self._id, None, KEPT_CHECKPOINTS)
        return {int(row["step"]) for row in rows}

    def finish(
        self, weights: Mapping[str, Tensor], before: str, history: Sequence[Mapping[str, float]], tokens: int
    ) -> None:
        """Write the model and the table of steps. Raises TrainingError if no weight has changed."""
        folder = self._data_dir / "models" / self._id
        with open_draft(folder) as draft:
            draft.mkdir(parents=True)
            digest = save_tensors(weights, draft / WEIGHTS_FILE)
            if digest == before:
                raise TrainingError("training changed no weight; raise learning_rate_multiplier")
        results = f"file-{self._id.removeprefix('ftjob-')}"
        table = _HEADER
        for number, metrics in enumerate(history, start=1):
            finite = _finite(metrics)
            values = (f"{finite[name]:.6g}" if name in finite else "" for name in _COLUMNS)
            table += ",".join([str(number), *values]) + "\n"
        self._files.write_results(results, "step_metrics.csv", table)
        model = self._model(folder, digest, None) | {"metrics": {}}
        self._jobs.succeed(self._id, model, trained_tokens=tokens, result_files=[results])

    def _model(self, folder: Path, digest: str, step: int | None) -> Row:
        """Return a model's row. Its folder is relative, because the data folder may be moved."""
        values = self._job["hyperparameters"]
        rank = values["lora_rank"]
        return {
            "id": model_name(self._job["model"], self._job["suffix"], self._id, step),
            "created": time.time(),
            "job": self._id,
            "folder": str(folder.relative_to(self._data_dir)),
            "lora": {"r": rank, "alpha": values["lora_alpha"]} if rank else None,
            "digest": digest,
            "step": step,
        }


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Drop numbers that JSON cannot represent."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
