"""One of the processes that train a job of the adapter `local` together, on the nodes of a cluster.

The run writes an order into the job's folder, and the process tells the run how the job goes.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from etude.algorithms.algorithm import Algorithm
from etude.backends.local_config import LocalAdapterConfig, LoraConfig
from etude.backends.local_job import Job, Work, failure
from etude.cluster.launch import HeadLost, Seat, own_seat
from etude.config.import_path import import_object, make_importable
from etude.config.registry import load_entry_points
from etude.core.errors import EtudeError, StoreError, words_of
from etude.core.job import ModelVersion
from etude.core.keys import fold
from etude.core.process import set_up_process
from etude.core.trajectory import TrajectoryCollection
from etude.jobs.content import JobContent, data_hash
from etude.jobs.folders import StateFolders
from etude.jobs.part import PEER_SECONDS, asked_to_end, loading_of, locked_seat
from etude.jobs.training import Interrupted, JobListener, units_of_collection
from etude.learner.learner import Learner, LearnerOptions, TrainingCanceled
from etude.learner.plan import Step
from etude.learner.team import PeerLost, Team, joined
from etude.models.policy import LoraOptions, Policy
from etude.store.files import write_atomically

_LOG = logging.getLogger("etude.learners")


class _Reporter(JobListener):
    """Tells the run how the job goes."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def went_back(self, step: int, damage: Sequence[str]) -> None:
        on = f"it went on from step {step}" if step else "it began anew"
        self._seat.call("noted", f"a checkpoint of the job was damaged: {'; '.join(damage)}; {on}")

    def started(self, done: int) -> None:
        _LOG.info("begins after %d steps", done)

    def stepped(self, step: Step, metrics: Mapping[str, float]) -> None:
        self._seat.call("stepped", step.number, step.of, dict(metrics))


def learn(folder: Path, seat: Seat) -> bool:
    """Do this process's part of the job in `folder`; whether that is done.

    A job that would fail again has failed: the run is told why. Raises PeerLost and HeadLost.
    """
    try:
        seat.require_shared()
        order, collection = LearningOrder.read(folder)
        if data_hash(collection) != order.content.data:
            raise StoreError(f"{folder} has other data than the run has written there")
        with joined(order.device, PEER_SECONDS, shards=order.config.shard_training) as team:
            lock = locked_seat(seat, team)
            try:
                _train(order, collection, folder, team, seat)
            finally:
                lock.release()
        return True
    except (Interrupted, TrainingCanceled) as reason:
        _LOG.warning("job in %s: %s", folder, type(reason).__name__)
        return True
    except (PeerLost, HeadLost):
        raise
    except EtudeError as error:
        seat.call("failed", str(error))
    except RuntimeError as error:
        seat.call("failed", str(failure(error)))
    except Exception as error:  # noqa: BLE001  trying again would end the same way, whatever it was
        _LOG.exception("job in %s", folder)
        seat.call("failed", f"training failed: {words_of(error)}")
    return False


def _train(
    order: LearningOrder, collection: TrajectoryCollection, folder: Path, team: Team, seat: Seat
) -> None:
    """Train from the newest checkpoint on, and write the version."""
    algorithm, versions = _algorithm(order), StateFolders(order.versions, "v", "version")
    policy = _policy(order, team)
    groups = units_of_collection(collection, algorithm, policy.template)
    work = Work(order.job, order.number, algorithm, order.config, groups, order.content, order.seed)
    learner = Learner(policy, order.options, team)
    begins_from = 0 if order.begins_from is None else order.begins_from.number
    if order.start.number > begins_from:
        learner.restore(versions.folder(order.start.number))
    checkpoints = StateFolders(folder, "step-", "checkpoint")

    def look(canceled: threading.Event, stopping: threading.Event) -> None:
        if seat.stopping():
            stopping.set()

    with asked_to_end(look) as (canceled, stopping):
        metrics = work.train(learner, _Reporter(seat), canceled, stopping, checkpoints)
        work.write(learner, versions, metrics)
    if team.leads and learner.note is not None:
        seat.call("noted", learner.note)


def _algorithm(order: LearningOrder) -> Algorithm:
    """The algorithm, whose module may be one of the user's in the current folder. Raises RequestError."""
    load_entry_points()
    make_importable(Path.cwd())
    kind = import_object(order.algorithm)
    algorithm: Algorithm = kind.model_validate(order.gradient)
    return algorithm


def _policy(order: LearningOrder, team: Team) -> Policy:
    """The policy with the weights that the job starts from.

    Raises EngineError where the model of this node is not that of the run.
    """
    loading = loading_of(team, order.device, order.dtype)
    policy = Policy.load(order.model, device=loading["device"], dtype=loading["dtype"])
    if order.lora is not None:
        policy.use_lora(LoraOptions(**order.lora.model_dump()), fold(order.seed, "lora"))
    policy.keep_base()
    if order.begins_from is not None:
        policy.begin_from(order.begins_from)
    policy.adopt(order.start)
    return policy


def main() -> int:
    """Do the part of the process whose place this one has; the exit code."""
    set_up_process()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    seat = own_seat()
    if seat is None:
        sys.stderr.write("this program is started by a run whose `cluster` has `learners`\n")
        return 2
    try:
        return 0 if learn(Path(sys.argv[1]), seat) else 1
    except (PeerLost, HeadLost) as error:
        # The job goes on from its last checkpoint, with new processes.
        _LOG.error("job in %s: %s", sys.argv[1], error)
        return 1


_ORDER, _DATA = "order.json", "collection.json"
_PROGRESS, _NOTE, _FAILURE = "progress.json", "note.json", "failure.json"


class LearningOrder(BaseModel):
    """All that a job is made of but its data, which lies beside it. It has no secrets."""

    model_config = ConfigDict(frozen=True)

    job: str
    number: int
    """Of the version that it makes."""
    versions: Path
    """The folder of all versions."""
    model: str
    device: str
    dtype: str
    """Of the weights that the agents sample from."""
    lora: LoraConfig | None
    seed: int
    start: ModelVersion
    begins_from: ModelVersion | None
    """The version that a warm-up made, which training begins with in place of the base model."""
    config: LocalAdapterConfig
    options: LearnerOptions
    algorithm: str
    """The import path of its class."""
    gradient: dict[str, Any]
    """The options of its gradient."""
    content: JobContent

    def write(self, folder: Path, data: TrajectoryCollection) -> None:
        """Write order and data. Raises StoreError."""
        write_atomically(folder / _DATA, data.model_dump_json(), exact=True)
        write_atomically(folder / _ORDER, self.model_dump_json(), exact=True)

    @classmethod
    def read(cls, folder: Path) -> tuple[LearningOrder, TrajectoryCollection]:
        """The order and the data in a job's folder."""
        order = cls.model_validate_json((folder / _ORDER).read_text(encoding="utf-8"))
        data = TrajectoryCollection.model_validate_json((folder / _DATA).read_text(encoding="utf-8"))
        return order, data


class JobDesk:
    """The head's end of the line on which processes say how their job goes: files in its folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def stepped(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        """A step was taken."""
        progress = {"step": step, "of": of, "metrics": dict(metrics)}
        write_atomically(self._folder / _PROGRESS, json.dumps(progress))

    def noted(self, note: str) -> None:
        """Something that a person should know once the job is done."""
        write_atomically(self._folder / _NOTE, json.dumps(note))

    def failed(self, reason: str) -> None:
        """It would fail again; the reason that comes first counts."""
        if not (self._folder / _FAILURE).exists():
            write_atomically(self._folder / _FAILURE, json.dumps(reason))


class JobNews:
    """The news from the desk of a job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Forget what was said of an earlier attempt."""
        for name in (_PROGRESS, _NOTE, _FAILURE):
            (self._folder / name).unlink(missing_ok=True)

    @property
    def failure(self) -> str | None:
        """Why the job has failed, if it has."""
        reason: str | None = self._read(_FAILURE)
        return reason

    @property
    def note(self) -> str | None:
        """Something that a person should know once the job is done."""
        note: str | None = self._read(_NOTE)
        return note

    @property
    def step(self) -> int:
        """The last step that was taken."""
        return int((self._read(_PROGRESS) or {"step": 0})["step"])

    def tell(self, job: Job) -> None:
        """Hand the progress on."""
        progress = self._read(_PROGRESS)
        if progress is not None:
            job.metrics, job.progress = progress["metrics"], 100.0 * progress["step"] / progress["of"]

    def _read(self, name: str) -> Any:
        with suppress(FileNotFoundError):
            return json.loads((self._folder / name).read_text(encoding="utf-8"))
        return None
