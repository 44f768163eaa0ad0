"""The status that a run publishes in its folder while it runs: its processes, models and queues."""

import contextlib
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, Field, ValidationError

from etude.core.interfaces import Totals
from etude.store.run_folder import LOCK, lock_holder

STATUS = "status.json"
"""The file is rewritten every second during a run, and deleted at its end."""

SILENT_SECONDS = 10.0
"""If a run continues and its status is older than this, the status counts as silent."""


class Team(BaseModel, frozen=True):
    """The processes of a job that trains on a cluster now."""

    wanted: int
    """How many processes the job was asked for."""
    nodes: list[str]
    """The address of each process's node, as soon as it has been placed."""
    since: float
    """When this state began, in Unix seconds."""


class RunnerStatus(BaseModel, frozen=True):
    """One process that plays episodes."""

    number: int
    node: str
    """Its node; empty until it has been placed."""
    state: str
    """`ready`, `starting`, `idle` before its first episode, `closed` if there is no room any more."""
    seconds: float | None
    """How long it has been ready, or starting."""
    episodes: int
    """How many episodes are there now."""


class ModelStatus(BaseModel, frozen=True):
    """One model that agents call."""

    name: str
    version: int
    waiting: int
    """How many calls wait for an answer."""
    oldest: float | None
    """How many seconds the oldest of these calls has waited."""


class JournalStatus(BaseModel, frozen=True):
    """The journal on the head's disk."""

    committed: int
    """How many entries were committed since the head began."""
    waiting: int
    """How many entries wait for a commit."""
    waiting_seconds: float = 0.0
    """Seconds since the last batch, or since the first waiting entry was queued. 0 if none waits."""


class Wait(BaseModel, frozen=True):
    """Something that the run waits for."""

    what: str
    seconds: float


class RunStatus(BaseModel, frozen=True):
    """A run as its own process sees it."""

    run: str
    pid: int
    host: str
    at: float
    """When this was written, in Unix seconds."""
    since: float
    """When the process began, in Unix seconds."""
    phase: str
    phase_seconds: float
    epoch: int | None
    """From 1; None before the first epoch."""
    num_epochs: int
    expected: int | None
    """The number of episodes in the phase, if it is known."""
    finished: int
    """How many of them are over."""
    playing: int
    waiting: int | None
    """How many of them have not begun; None if `expected` is not known."""
    totals: Totals
    runners: list[RunnerStatus]
    learners: list[Team] = Field(default_factory=list)
    """The processes that train now, for each job."""
    models: list[ModelStatus]
    journal: JournalStatus
    waits: list[Wait] = Field(default_factory=list)
    """The longest first."""


Liveness: TypeAlias = Literal["live", "silent", "starting", "ended", "lost"]


@dataclass(frozen=True, slots=True)
class SeenStatus:
    """The status of a run, with its reliability."""

    state: Liveness
    """`live`: a head runs; `silent`: its status is old; `starting`: it has not written one yet; `ended`: no
    head runs; `lost`: the last head was killed."""
    status: RunStatus | None
    """The last status of a head; None if there is none."""
    pid: int | None
    """The process that runs now."""
    age: float | None
    """Seconds since the status was written."""


def run_status(run: Path) -> SeenStatus:
    """Return the status of a run. The lock on its folder decides if the run continues, never the file."""
    pid, status = lock_holder(run / LOCK), None
    # Perhaps no head has written it yet, or one of another version of Etude has.
    with contextlib.suppress(OSError, ValidationError):
        status = RunStatus.model_validate_json((run / STATUS).read_text(encoding="utf-8"))
    age = None if status is None else max(0.0, time.time() - status.at)
    if status is not None and age is not None and status.host != socket.gethostname() and pid is None:
        # The lock of a head on another machine is visible only if the file system shares locks.
        pid = status.pid if age < SILENT_SECONDS else None
    if pid is None:
        return SeenStatus("ended" if status is None else "lost", status, None, age)
    if status is None or age is None or status.pid != pid:
        return SeenStatus("starting", None, pid, None)
    return SeenStatus("live" if age < SILENT_SECONDS else "silent", status, pid, age)
