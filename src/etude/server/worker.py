"""The worker: one or more processes that train a job.

`python -m etude.server.worker [ORDER]`. Without an order it is the nursery of those that are forked.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from etude.algorithms.algorithm import load_algorithms
from etude.cluster.launch import HeadLost, Seat, own_seat
from etude.core.errors import EtudeError, StoreError
from etude.core.process import set_up_process
from etude.jobs.part import PEER_SECONDS, asked_to_end, loading_of, locked_seat
from etude.jobs.training import Interrupted, TooLittleMemory
from etude.learner.learner import TrainingCanceled
from etude.learner.team import PeerLost, Team, joined
from etude.report.logs import LogLevel, show_logs
from etude.server.extensions import load_extensions
from etude.server.jobs import FINAL, JobFolder
from etude.server.settings import LIFELINE, ServerSettings, WorkerOrder
from etude.server.stores import Stores, stores_at, stores_here
from etude.server.training import train_job
from etude.store.files import open_private
from etude.store.run_folder import RunLock
from etude.wire.http_server import ApiError

_LOG = logging.getLogger("etude.server.worker")
_ALONE_SECONDS = 60.0
"""For a worker to end with a checkpoint once its server is no more."""
_IDLE_SECONDS = 900.0
"""After which a nursery without orders and workers ends, to give back its memory."""


def work(order: WorkerOrder) -> bool:
    """Train the job, alone or as one of its processes; whether this one has done its part."""
    load_algorithms(order.settings.algorithms)
    seat = own_seat()
    try:
        with _team(order.settings, seat) as team:
            return run_order(order, team, seat)
    except (PeerLost, HeadLost) as error:
        # The job goes on from its last checkpoint, with new processes.
        _LOG.error("job %s: %s", order.job, error)
        return False


def run_order(order: WorkerOrder, team: Team, seat: Seat | None = None) -> bool:
    """Train the job, unless another worker does; how it ended is in the database.

    `seat` is the place of this process, where a cluster started it. False when it failed. Raises PeerLost
    and HeadLost.
    """
    with stores_here(order.settings) if seat is None else nullcontext(stores_at(seat)) as stores:
        jobs, lock = stores.jobs, None
        try:
            lock = _locked(JobFolder(order.settings.data_dir, order.job), team, seat)
            if lock is not None and team.any(team.leads and jobs.get(order.job)["status"] == "running"):
                _train(order, team, stores, seat)
            return True
        except (Interrupted, TrainingCanceled) as reason:
            _LOG.warning("job %s: %s", order.job, type(reason).__name__)
            return True
        except (PeerLost, HeadLost):
            raise
        except ApiError as error:
            jobs.fail(order.job, str(error.detail), "invalid_request", error.param)
        except TooLittleMemory as error:
            jobs.fail(order.job, str(error), "insufficient_memory")
        except EtudeError as error:
            jobs.fail(order.job, str(error), "training_failed")
        except Exception as error:  # noqa: BLE001  trying again would end the same way, whatever it was
            _LOG.exception("job %s", order.job)
            first = (str(error).strip() or "no message").splitlines()[0]
            jobs.fail(order.job, f"{type(error).__name__}: {first}", "training_failed")
        finally:
            if lock is not None:
                lock.release()
    return False


def _train(order: WorkerOrder, team: Team, stores: Stores, seat: Seat | None) -> None:
    settings = order.settings
    settings = settings.model_copy(update=loading_of(team, settings.device, settings.dtype))

    def look(canceled: threading.Event, stopping: threading.Event) -> None:
        """The job may be canceled or paused, and processes on a cluster be asked to make way."""
        status = stores.jobs.get(order.job)["status"]
        if status in FINAL:
            canceled.set()
        elif status != "running" or (seat is not None and seat.stopping()):
            stopping.set()

    with asked_to_end(look) as (canceled, stopping):
        train_job(settings, stores.jobs.get(order.job), stores, team, canceled, stopping)


def _team(settings: ServerSettings, seat: Seat | None) -> AbstractContextManager[Team]:
    """The processes that train the job together. Entering it raises PeerLost."""
    if settings.training_processes == 1 and seat is None:
        return nullcontext(Team())
    return joined(settings.device, PEER_SECONDS, shards=settings.shard_training)


def _locked(folder: JobFolder, team: Team, seat: Seat | None) -> RunLock | None:
    """This process's lock; None in all processes when another worker has the job.

    The lock of a job on a cluster is its launcher's, and the processes have others. Raises StoreError where
    they do not share the folder, PeerLost where an earlier team does not end.
    """
    if seat is not None:
        seat.require_shared()
        return locked_seat(seat, team)
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


def _nursery() -> WorkerOrder | None:
    """Fork a worker for each order, a line on standard input: its order in the worker, and None in the end.

    Says on standard output who was started (`PID`), and how each ended (`PID CODE`). What takes seconds to
    import is imported before. The nursery ends after its input and its workers, or a while without either.
    """
    with suppress(ImportError):  # A job that needs it will say so.
        import peft  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    with suppress(EtudeError):
        load_extensions()
        load_algorithms(())
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes)
    workers: set[int] = set()
    sources, text = [0, woken], b""
    while workers or 0 in sources:
        ready, _, _ = select.select(sources, [], [], None if workers else _IDLE_SECONDS)
        if not ready:
            break
        if woken in ready:
            os.read(woken, 4096)
        for pid in sorted(workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                workers.remove(pid)
                _say(f"{pid} {os.waitstatus_to_exitcode(status)}")
        if 0 in ready:
            read = os.read(0, 65536)
            if not read:
                sources.remove(0)
            *lines, text = (text + read).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    for descriptor in (woken, wakes):
                        os.close(descriptor)
                    return _born(line)
                workers.add(pid)
                _say(f"{pid}")
    return None


def end_with_the_server(connection: int) -> None:
    """Have this process end as by SIGTERM once the other end of a connection is closed, as it is by the
    server's end, and by SIGKILL if that takes too long."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, 0)
        if any(event & select.POLLHUP for _, event in poll.poll()):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_ALONE_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="etude-server-watch", daemon=True).start()


def _say(line: str) -> None:
    with suppress(BrokenPipeError):  # A server that was killed does not listen any more.
        os.write(1, line.encode() + b"\n")


def _born(line: bytes) -> WorkerOrder:
    """The order of the worker that this process is from now on; its output is the job's log."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    order = WorkerOrder.model_validate_json(line)
    end_with_the_server(int(os.environ[LIFELINE]))
    with (
        open_private(JobFolder(order.settings.data_dir, order.job).log, "ab") as log,
        Path(os.devnull).open("rb") as nothing,
    ):
        for descriptor, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), descriptor)
    if sys.platform != "linux":  # Elsewhere a library may break in a fork.
        os.execv(sys.executable, [sys.executable, "-m", "etude.server.worker", line.decode()])
    return order


def main() -> int:
    """Work by the order on the command line or on standard input; the exit code."""
    set_up_process()
    show_logs(LogLevel.INFO)
    if len(sys.argv) > 1:
        order: WorkerOrder | None = WorkerOrder.model_validate_json(sys.argv[1])
        end_with_the_server(0)
    else:
        order = _nursery()
    if order is not None:
        show_logs(order.settings.log_level)
        _LOG.debug("order: %s", order.model_dump_json())
    return 0 if order is None or work(order) else 1


if __name__ == "__main__":
    sys.exit(main())
