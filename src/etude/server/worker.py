"""The worker: a process that trains one job. `python -m etude.server.worker ORDER`."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from etude.core.errors import EtudeError, StoreError
from etude.learner.learner import TrainingCanceled
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


class WorkerOrder(BaseModel):
    """What a worker is to do. It is on the worker's command line, and has no secrets."""

    model_config = ConfigDict(frozen=True)

    data_dir: Path
    job: str
    source: str
    name: str
    """What clients call the base model."""
    device: str
    dtype: str
    checkpoint_steps: int


def run_order(order: WorkerOrder) -> None:
    """Train the job, unless another worker does; how it ended is in the database."""
    database = open_database(order.data_dir / "server.db")
    jobs = JobStore(database)
    try:
        lock = RunLock(JobFolder(order.data_dir, order.job).lock)
    except StoreError:
        return  # Another worker has the job.
    try:
        job = jobs.get(order.job)
        if job["status"] == "running":
            files = FileStore(database, order.data_dir)
            models = ModelStore(database, order.data_dir, order.name)
            place = Place(order.data_dir, order.source, order.device, order.dtype, order.checkpoint_steps)
            with _signals() as stopping, _canceled(jobs, order.job) as canceled:
                JobTraining(place, job, jobs, files, models).run(canceled, stopping)
    except (Interrupted, TrainingCanceled) as reason:
        _LOG.warning("job %s: %s", order.job, type(reason).__name__)
    except ApiError as error:
        jobs.fail(order.job, str(error.detail), "invalid_request", error.param)
    except EtudeError as error:
        jobs.fail(order.job, str(error), "training_failed")
    except Exception as error:  # noqa: BLE001  trying again would end the same way, whatever it was
        _LOG.exception("job %s", order.job)
        first = (str(error).strip() or "no message").splitlines()[0]
        jobs.fail(order.job, f"{type(error).__name__}: {first}", "training_failed")
    finally:
        lock.release()
        database.dispose()


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


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_order(WorkerOrder.model_validate_json(sys.argv[1]))
