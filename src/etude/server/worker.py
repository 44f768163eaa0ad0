"""The worker: one or more processes that train a job.

`python -m etude.server.worker [ORDER]`. Without an order it makes itself ready, and reads one from its
standard input: a line that may come late.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict

from etude.algorithms.algorithm import load_algorithms
from etude.core.errors import EtudeError, StoreError
from etude.core.garbage import collect_rarely
from etude.learner.learner import TrainingCanceled
from etude.learner.team import PeerLost, Team, joined
from etude.models.device import choose_device, choose_dtype, dtype_name
from etude.report.logs import LogLevel, show_logs
from etude.server.database import open_database
from etude.server.errors import ApiError
from etude.server.files import FileStore
from etude.server.job_folder import JobFolder
from etude.server.jobs import JobStore
from etude.server.models import ModelStore
from etude.server.training import Interrupted, JobTraining, Place
from etude.store.lock import RunLock

_LOG = logging.getLogger("etude.server.worker")
_LOOK_SECONDS = 0.5
_IDLE_SECONDS = 900.0
"""After which a worker that got no order ends, to give back its memory."""
_PEER_SECONDS = 600.0
"""That a process waits for another: longer than any checkpoint takes to write."""


class WorkerOrder(BaseModel):
    """What a worker is to do. It may be on the worker's command line, and has no secrets."""

    model_config = ConfigDict(frozen=True)

    data_dir: Path
    job: str
    source: str
    name: str
    """What clients call the base model."""
    device: str
    dtype: str
    checkpoint_steps: int
    processes: int
    """That train the job together, this one among them."""
    shards: bool
    """Whether each of them holds a part of the weights."""
    algorithms: tuple[str, ...] = ()
    """Algorithms of the server's owner, to be imported: `module:Name`."""
    log_level: LogLevel = LogLevel.INFO


def work(order: WorkerOrder) -> bool:
    """Train the job, alone or as one of its processes; whether this one has done its part."""
    load_algorithms(order.algorithms)
    try:
        with _team(order) as team:
            return run_order(order, team)
    except PeerLost as error:
        # The job goes on from its last checkpoint, with new processes.
        _LOG.error("job %s: %s", order.job, error)
        return False


def run_order(order: WorkerOrder, team: Team) -> bool:
    """Train the job, unless another worker does; how it ended is in the database.

    False when it failed. Raises PeerLost.
    """
    database = open_database(order.data_dir / "server.db")
    jobs = JobStore(database)
    lock: RunLock | None = None
    try:
        lock = _locked(JobFolder(order.data_dir, order.job), team)
        if lock is not None and team.any(team.leads and jobs.get(order.job)["status"] == "running"):
            _train(order, team, jobs, database)
        return True
    except (Interrupted, TrainingCanceled) as reason:
        _LOG.warning("job %s: %s", order.job, type(reason).__name__)
        return True
    except PeerLost:
        raise
    except ApiError as error:
        jobs.fail(order.job, str(error.detail), "invalid_request", error.param)
    except EtudeError as error:
        jobs.fail(order.job, str(error), "training_failed")
    except Exception as error:  # noqa: BLE001  trying again would end the same way, whatever it was
        _LOG.exception("job %s", order.job)
        first = (str(error).strip() or "no message").splitlines()[0]
        jobs.fail(order.job, f"{type(error).__name__}: {first}", "training_failed")
    finally:
        if lock is not None:
            lock.release()
        database.dispose()
    return False


def _train(order: WorkerOrder, team: Team, jobs: JobStore, database: sa.Engine) -> None:
    files = FileStore(database, order.data_dir)
    models = ModelStore(database, order.data_dir, order.name)
    device = order.device if team.device is None else str(team.device)
    dtype = order.dtype
    if team.shards:
        # The whole model need not fit on the device where a part of it will be.
        dtype, device = dtype_name(choose_dtype(dtype, choose_device(device))), "cpu"
    place = Place(order.data_dir, order.source, device, dtype, order.checkpoint_steps)
    with _signals() as stopping, _canceled(jobs, order.job) as canceled:
        JobTraining(place, jobs.get(order.job), jobs, files, models, team).run(canceled, stopping)


@contextmanager
def _team(order: WorkerOrder) -> Iterator[Team]:
    """The processes that train the job together. Raises PeerLost."""
    if order.processes == 1:
        yield Team()
        return
    with joined(order.device, _PEER_SECONDS, shards=order.shards) as team:
        yield team


def _locked(folder: JobFolder, team: Team) -> RunLock | None:
    """This process's lock; None in all processes when another worker has the job."""
    lock: RunLock | None = None
    # First the leader: of two workers that are started at once, one must get all locks.
    for leads in (True, False):
        if team.leads is leads:
            with suppress(StoreError):
                lock = RunLock(folder.lock_of(team.rank))
        if team.any(team.leads is leads and lock is None):
            if lock is not None:
                lock.release()
            return None
    return lock


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set when the process is asked to end (SIGTERM)."""
    stopping = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _canceled(jobs: JobStore, job: str) -> Iterator[threading.Event]:
    """Set when the job is not to run any more."""
    canceled, over = threading.Event(), threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            if jobs.get(job)["status"] != "running":
                canceled.set()
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield canceled
    finally:
        over.set()
        thread.join()


def _awaited_order() -> WorkerOrder | None:
    """The order, once it is there; from then on the output is the job's log. None when none will come.

    Everything that takes long to import is imported before.
    """
    with suppress(ImportError):  # A job that needs it will say so.
        import peft  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    load_algorithms(())
    coming, _, _ = select.select([sys.stdin], [], [], _IDLE_SECONDS)
    line = sys.stdin.readline() if coming else ""
    if not line:
        return None
    order = WorkerOrder.model_validate_json(line)
    with JobFolder(order.data_dir, order.job).log.open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    return order


def main() -> int:
    """Work by the order on the command line or on standard input; the exit code."""
    collect_rarely()
    show_logs(LogLevel.INFO)
    order = WorkerOrder.model_validate_json(sys.argv[1]) if len(sys.argv) > 1 else _awaited_order()
    if order is not None:
        show_logs(order.log_level)
        _LOG.debug("order: %s", order.model_dump_json())
    return 0 if order is None or work(order) else 1


if __name__ == "__main__":
    sys.exit(main())
