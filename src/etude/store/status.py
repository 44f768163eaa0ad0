"""The status that a run publishes in its folder while it goes on: what runs where, and what is waited for."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, Field, ValidationError

from etude.core.errors import StoreError
from etude.store.files import write_atomically
from etude.store.run_folder import LOCK, locked_by

STATUS = "status.json"
"""Written anew every second while a run goes on, and deleted at its end."""

SILENT_SECONDS = 10.0
"""From this age on, the status of a run that goes on is said to be old."""

LEARNERS = "learners"
"""The folder in a run folder where a cluster's nodes train, with their log."""
TEAM = "team.json"


class _Value(BaseModel, frozen=True):
    pass


class Team(_Value):
    """The processes of a job that trains now on a cluster, as a file of its folder tells."""

    wanted: int
    """Processes that the job was asked for."""
    nodes: tuple[str, ...]
    """The address of the node of each; none while the cluster has no room for them."""
    since: float
    """When this became so; Unix seconds."""


class RunnerStatus(_Value):
    """One process that plays episodes."""

    number: int
    node: str
    """Where it is; empty until it has been placed."""
    state: str
    """`ready`, `starting`, `idle` before its first episode, `closed` where there is no room any more."""
    seconds: float | None
    """For how long it has been ready, or starting."""
    episodes: int
    """Episodes that are there now."""


class ModelStatus(_Value):
    """One model that agents call."""

    name: str
    version: int
    waiting: int
    """Calls that wait for an answer."""
    oldest: float | None
    """Seconds that the one of them has waited which began first."""


class JournalStatus(_Value):
    """The journal on the head's disk."""

    committed: int
    """Entries since the head began."""
    waiting: int
    """Entries that are not on the disk yet."""
    waiting_seconds: float = 0.0
    """For how long entries have waited and none has come to the disk."""


class Wait(_Value):
    """Something that the run waits for."""

    what: str
    seconds: float


class Totals(BaseModel):
    """Counts since the head began; episodes that were read back from the journal are in them."""

    finished: int = 0
    failed: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    scores: int = 0
    score_sum: float = 0.0
    trained: int = 0
    """Epochs that were trained on, each target's by itself."""
    skipped: int = 0


class RunStatus(_Value):
    """A run as its own process sees it."""

    run: str
    pid: int
    host: str
    at: float
    """When this was so; Unix seconds."""
    since: float
    """When that process began; Unix seconds."""
    phase: str
    phase_seconds: float
    epoch: int | None
    """From 1; None before the first."""
    num_epochs: int
    expected: int | None
    """Episodes of the phase, where that is known."""
    finished: int
    """Of these, those that are over."""
    playing: int
    waiting: int | None
    """Of these, those that have not begun; None where it is not known how many are expected."""
    totals: Totals
    rewards: dict[str, float]
    """The mean reward of the last epoch's episodes by target; under an empty name where there is one."""
    validation: dict[str, float]
    """The same of the last validation."""
    runners: list[RunnerStatus]
    learners: list[Team] = Field(default_factory=list)
    """The processes that train now, of each job."""
    models: list[ModelStatus]
    journal: JournalStatus
    dashboard: str | None = None
    """The address of the web page of the cluster that it is on."""
    metrics: str | None = None
    """Where the run's metrics for Prometheus are."""
    waits: list[Wait] = Field(default_factory=list)
    """The longest first."""


Liveness: TypeAlias = Literal["live", "silent", "starting", "ended", "lost"]


@dataclass(frozen=True, slots=True)
class SeenStatus:
    """The status of a run, and how far it can be believed."""

    state: Liveness
    """`live`; `silent`: the head runs and says nothing new; `starting`: it has said nothing yet; `ended`: no
    head runs; `lost`: nor does one, and the last was killed."""
    status: RunStatus | None
    """The last word of a head; None where there is none."""
    pid: int | None
    """The process that runs now."""
    age: float | None
    """Seconds since the status was written."""


def status_of(run: Path) -> SeenStatus:
    """The status of a run; whether it goes on is told by the lock on its folder, and never by the file.

    Raises StoreError for a file that another version has written.
    """
    pid, status = locked_by(run / LOCK), _read(run / STATUS)
    age = None if status is None else max(0.0, time.time() - status.at)
    if status is not None and age is not None and status.host != socket.gethostname() and pid is None:
        # Of a head on another machine the lock is seen only where the storage shares it.
        pid = status.pid if age < SILENT_SECONDS else None
    if pid is None:
        return SeenStatus("ended" if status is None else "lost", status, None, age)
    if status is None or age is None or status.pid != pid:
        return SeenStatus("starting", None, pid, None)
    return SeenStatus("live" if age < SILENT_SECONDS else "silent", status, pid, age)


def _read(path: Path) -> RunStatus | None:
    try:
        return RunStatus.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise StoreError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); was it written by another etude?"
        ) from error


def tell_team(folder: Path, wanted: int, nodes: tuple[str, ...] = ()) -> None:
    """Write down where the processes of a job are. Raises StoreError."""
    write_atomically(folder / TEAM, Team(wanted=wanted, nodes=nodes, since=time.time()).model_dump_json())


def teams_of(run: Path) -> list[Team]:
    """The teams that train for a run now; the file of one that has ended, however it did, is not counted."""
    teams, folder = list[Team](), run / LEARNERS
    for path in sorted((*folder.glob(TEAM), *folder.glob(f"*/{TEAM}"))):
        try:
            if locked_by(path.parent / LOCK) is not None:
                teams.append(Team.model_validate_json(path.read_text(encoding="utf-8")))
        except (OSError, ValidationError):
            continue  # It has just ended, or another version wrote it.
    return teams
