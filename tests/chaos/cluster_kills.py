"""Kills at random moments of a training run on a cluster, and what an operator does after each of them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.cluster_endpoint import EndpointProcess
from tests.chaos.nodes import add_node
from tests.chaos.project import NAME, journal_of, write_project

Note = Callable[[str], None]

NODE_CPUS = 2

_COMMIT_SECONDS = 180.0
"""For the next commit after a kill, and for the first one of a run: a job of learners lies between two."""
_TARGET_SECONDS = 60.0
"""For one of the kind that is to be killed to be there."""
_PAUSES = (0.2, 2.5)
"""Seconds between a recovery and the next kill."""
_REPAIR_SECONDS = 1.5
"""At most, until an operator puts another in the place of what is gone."""
_LOOK_SECONDS = 0.05
_FOLLOWED = 0.15
"""How often a kill is followed by another before anything has recovered."""
_MOST_FAILURES = 5
"""Ends of a run's head that nobody asked for, and times that it hung."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, and how long it was until the next commit."""

    kind: str
    recovery: float | None
    """Seconds; None where the run ended before another commit, or where another kill came first."""
    commits: int
    """In the journal when it was killed."""


@dataclass
class Tally:
    """All that happened to one run."""

    kills: list[Kill] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    """Seconds from each kill, or the first of several, to the next commit."""
    hung: list[str] = field(default_factory=list)
    """After which kill nothing was committed for too long, with the ends of the logs."""
    failures: list[str] = field(default_factory=list)
    """Ends of the head that nobody asked for, with the end of its log."""


class Operator:
    """Starts a run with all that it needs, kills parts of it, and puts others in their place."""

    def __init__(
        self, folder: Path, cluster: Any, choice: random.Random, epochs: int, learners: int | None
    ) -> None:
        self.folder = folder
        self._cluster = cluster
        self._choice = choice
        # Beside the project, which goes along to the nodes.
        self.paid_log, self._head_log = folder.with_suffix(".paid"), folder.with_suffix(".log")
        self.endpoints = [
            EndpointProcess(name, journal_of(folder), self.paid_log) for name in ("first", "second")
        ]
        urls = [each.url for each in self.endpoints]
        write_project(folder, cluster.address, urls, epochs, learners)
        self._head: subprocess.Popen[bytes] | None = None
        self.kinds: dict[str, Callable[[], Callable[[], None] | None]] = {
            "raylet": self._kill_raylet,
            "runner": self._kill_runner,
            "actor": self._kill_actor,
            "sampler": self._kill_sampler,
            "head": self._kill_head,
            "learner": self._kill_learner,
            "launcher": self._kill_launcher,
        }

    @contextmanager
    def started(self) -> Iterator[None]:
        """The endpoints and the head run within the block."""
        for endpoint in self.endpoints:
            endpoint.start()
        self.start_head()
        try:
            yield
        finally:
            for endpoint in self.endpoints:
                endpoint.kill()
            if self.is_running:
                self._kill_head()

    @property
    def is_running(self) -> bool:
        return self._head is not None and self._head.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._head is None else self._head.poll()

    def start_head(self) -> None:
        """`etude train`, or `etude resume` where there is a run."""
        there = (self.folder / "runs" / NAME / "config.yml").exists()
        # A head that was killed while it made the run folder leaves nothing that could go on.
        if not there:
            shutil.rmtree(self.folder / "runs", ignore_errors=True)
        command = ["resume", NAME] if there else ["train", "config.yml", "--name", NAME]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self._head_log.open("ab") as log:
            self._head = subprocess.Popen(
                [sys.executable, "-m", "etude", *command, "--json"],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self, kind: str) -> Callable[[], None] | None:
        """Kill one of a kind; what an operator does then. None where there is none of the kind now."""
        return self.kinds[kind]()

    def _kill_head(self) -> Callable[[], None] | None:
        if self._head is None or not self.is_running:
            return None
        self._head.kill()
        self._head.wait()
        return self.start_head

    def _kill_sampler(self) -> Callable[[], None] | None:
        endpoint = self._choice.choice(self.endpoints)
        endpoint.kill()
        return endpoint.start

    def _kill_raylet(self) -> Callable[[], None] | None:
        nodes = sorted(self._cluster.worker_nodes, key=lambda node: str(node.node_id))
        node = self._choice.choice(nodes)
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

        def replace() -> None:
            add_node(self._cluster, NODE_CPUS)

        return replace

    def _kill_runner(self) -> Callable[[], None] | None:
        return self._kill_one_of(self._runners())

    def _kill_actor(self) -> Callable[[], None] | None:
        return self._kill_one_of([process.parent() for process in self._runners()])

    def _kill_learner(self) -> Callable[[], None] | None:
        return self._kill_one_of([each for each in self._processes() if "ray::Part" in _command(each)])

    def _kill_launcher(self) -> Callable[[], None] | None:
        """The head's child that starts the learners of a job and watches them."""
        if self._head is None or not self.is_running:
            return None
        children = psutil.Process(self._head.pid).children()
        return self._kill_one_of([each for each in children if "etude.cluster.team" in _command(each)])

    def _kill_one_of(self, processes: list[Any]) -> Callable[[], None] | None:
        alive = sorted((each for each in processes if each is not None), key=lambda each: each.pid)
        if not alive:
            return None
        try:
            os.kill(self._choice.choice(alive).pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return lambda: None  # The run itself replaces it.

    def _runners(self) -> list[Any]:
        """The processes of runners that are started by actors on the cluster's nodes."""
        return [each for each in self._processes() if "etude.runners.program" in _command(each)]

    def _processes(self) -> Iterator[Any]:
        for node in self._cluster.worker_nodes:
            try:
                raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
                yield from raylet.children(recursive=True)
            except psutil.NoSuchProcess:
                continue

    def commits_after(self, moment: float) -> float | None:
        """When the first step after a moment was committed."""
        try:
            uri = f"file:{journal_of(self.folder)}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=10)) as journal:
                (first,) = journal.execute(
                    "SELECT min(created) FROM steps WHERE created > ?", (moment,)
                ).fetchone()
        except sqlite3.OperationalError:
            return None  # There is no journal yet.
        return None if first is None else float(first)

    def commits(self) -> int:
        """How many steps there are."""
        try:
            uri = f"file:{journal_of(self.folder)}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=10)) as journal:
                return int(journal.execute("SELECT count(*) FROM steps").fetchone()[0])
        except sqlite3.OperationalError:
            return 0

    def tails(self) -> str:
        """The ends of the logs, for whoever asks why nothing happens."""
        logs = [self._head_log, *sorted((self.folder / "runs" / NAME / "runners").glob("*.log"))]
        texts = [f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs if log.exists()]
        state = f"head: {'running' if self.is_running else self.exit_code}; {len(self._runners())} runners"
        return "\n".join([state, *texts])


def _command(process: Any) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Series:
    """Kills drawn from a bag, so that each kind appears as often as the others."""

    def __init__(self, choice: random.Random, kinds: list[str]) -> None:
        self._choice = choice
        self._kinds = kinds
        self._bag: list[str] = []

    def next(self) -> str:
        """The kind of the next kill."""
        if not self._bag:
            self._bag = self._choice.sample(self._kinds, len(self._kinds))
        return self._bag.pop()

    def put_back(self, kind: str) -> None:
        """Draw it again later: there was none to kill."""
        self._bag.insert(0, kind)


def kill_at_random(operator: Operator, series: Series, choice: random.Random, most: int, note: Note) -> Tally:
    """Kill parts of a run until it has ended, and at most so many; the run is over then."""
    tally = Tally()
    with operator.started():
        await_commit(operator, 0.0, "start", tally)
        while not ended(operator, tally, note):
            if len(tally.kills) >= most:
                await_commit(operator, time.time(), "the last kill", tally)
                continue
            pause(operator, choice.uniform(*_PAUSES))
            if operator.is_running:
                kill_one(operator, series, choice, most, tally, note)
    return tally


def kill_one(
    operator: Operator, series: Series, choice: random.Random, most: int, tally: Tally, note: Note
) -> None:
    """Kill, repair, and wait for the next commit.

    Now and then another kill comes before anything has recovered; the time counts from the first then.
    """
    first = 0.0
    kinds: list[str] = []
    commits = operator.commits()
    while not kinds or (len(tally.kills) + len(kinds) < most and choice.random() < _FOLLOWED):
        kind = series.next()
        repair = kill_when_there(operator, kind)
        if repair is None:
            series.put_back(kind)
            break
        first = first or time.time()
        kinds.append(kind)
        time.sleep(choice.uniform(0.0, _REPAIR_SECONDS))
        repair()
    if not kinds:
        return
    recovery = await_commit(operator, first, " and ".join(kinds), tally)
    # Of several it is that of none.
    tally.kills += [Kill(kind, recovery if len(kinds) == 1 else None, commits) for kind in kinds]
    tally.recoveries += [] if recovery is None else [recovery]
    seconds = "the run is over" if recovery is None else f"{recovery:.1f} s to the next commit"
    note(f"killed {len(tally.kills)}: {' and '.join(kinds)} after {commits} commits, {seconds}")


def kill_when_there(operator: Operator, kind: str) -> Callable[[], None] | None:
    """Kill one of a kind once there is one, as learners are while a job trains; None where none comes."""
    end = time.monotonic() + _TARGET_SECONDS
    while (repair := operator.kill(kind)) is None and operator.is_running and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    return repair


def pause(operator: Operator, seconds: float) -> None:
    """Wait, but not for a run that is over."""
    end = time.monotonic() + seconds
    while operator.is_running and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def await_commit(operator: Operator, moment: float, kind: str, tally: Tally) -> float | None:
    """Seconds from a moment to the next commit; None where the run ends without another one.

    Where nothing is committed for too long, the ends of the logs are kept and the head is killed.
    """
    end = time.monotonic() + _COMMIT_SECONDS
    while time.monotonic() < end:
        is_running = operator.is_running
        if (committed := operator.commits_after(moment)) is not None:
            return committed - moment
        if not is_running:
            return None
        time.sleep(_LOOK_SECONDS)
    tally.hung.append(f"nothing was committed for {_COMMIT_SECONDS:g} s after {kind}\n{operator.tails()}")
    operator.kill("head")
    operator.start_head()
    return None


def ended(operator: Operator, tally: Tally, note: Note) -> bool:
    """Whether the run is over. A head that ended by itself, or hung, is started again, a few times."""
    if operator.is_running:
        return len(tally.hung) > _MOST_FAILURES
    if operator.exit_code == 0:
        return True
    tally.failures.append(f"the head ended with exit code {operator.exit_code}\n{operator.tails()}")
    note(f"the head ended by itself, with exit code {operator.exit_code}")
    if len(tally.failures) > _MOST_FAILURES:
        return True
    operator.start_head()
    return False
