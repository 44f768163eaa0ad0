"""Training runs on a cluster whose parts are killed at random, to their ends: the part `cluster`.

Each run is compared with one that nobody disturbed: the same steps in its journal, and so the same calls,
episodes, scores and weights, bit for bit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.cluster_endpoint import PaidEndpoint
from tests.chaos.nodes import add_node, start_cluster
from tests.chaos.project import NAME, contents, differences, run_path, write_project
from tests.chaos.scene import Figures, Scene

_KILLS = (100, 6)
"""In full, and with `--quick`."""
_RUN_KILLS = 12
"""At most in one run."""
_NODE_CPUS = 2
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
_IN_A_ROW = 2
"""Kills in a row without a checkpoint of the job of learners: a third would fail it, as promised."""


@dataclass(frozen=True)
class _Kind:
    """A kind of run, and what is killed of it."""

    name: str
    epochs: int
    learners: int | None
    """On the cluster; None: the head trains."""
    parts: tuple[str, ...]
    """Parts that are killed; what is there twice is killed twice as often."""
    share: float
    """Of all kills."""


_KINDS = (
    _Kind("trained by the head", 10, None, ("raylet", "runner", "actor", "sampler", "head"), 0.7),
    _Kind("trained by two learners", 2, 2, ("learner", "learner", "raylet", "head"), 0.3),
)


@dataclass
class _Ends:
    """The ends of the runs."""

    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    """Seconds from each kill, or the first of several, to the next commit."""
    unequal: list[str] = field(default_factory=list)
    """For each run that ended otherwise, steps that differ."""
    paid_twice: int = 0
    requests: int = 0
    problems: list[str] = field(default_factory=list)
    """Heads that hung, or ended by themselves, with the ends of the logs."""


class _Operator:
    """Starts a run with all that it needs, kills parts of it, and puts others in their place."""

    def __init__(self, folder: Path, cluster: Any, choice: random.Random, kind: _Kind) -> None:
        self.folder = folder
        self._cluster, self._choice = cluster, choice
        # Beside the project, which goes along to the nodes.
        self.paid_log, self._head_log = folder.with_suffix(".paid"), folder.with_suffix(".log")
        self._endpoint = PaidEndpoint(run_path(folder) / "run.db", self.paid_log)
        write_project(folder, cluster.address, self._endpoint.url, kind.epochs, kind.learners)
        self._head: subprocess.Popen[bytes] | None = None

    @contextmanager
    def started(self) -> Iterator[None]:
        """The endpoint and the head run within the block."""
        self._endpoint.start()
        self.start_head()
        try:
            yield
        finally:
            self._endpoint.kill()
            if self.is_running:
                self.kill("head")

    @property
    def is_running(self) -> bool:
        return self._head is not None and self._head.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._head is None else self._head.poll()

    def start_head(self) -> None:
        """`etude train`, or `etude resume` where there is a run."""
        there = (run_path(self.folder) / "config.yml").exists()
        # A head that was killed while it made the run folder leaves nothing that could go on.
        if not there:
            shutil.rmtree(self.folder / "runs", ignore_errors=True)
        words = ["resume", NAME] if there else ["train", "config.yml", "--name", NAME]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self._head_log.open("ab") as log:
            command = [sys.executable, "-m", "etude", *words, "--json"]
            nothing = subprocess.DEVNULL
            self._head = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=nothing, stdout=log, stderr=log
            )

    def kill(self, part: str) -> Callable[[], None] | None:
        """Kill a part; what an operator does then. None where there is none of the kind now."""
        if part == "sampler":
            self._endpoint.kill()
            return self._endpoint.start
        if part == "raylet":
            nodes = sorted(self._cluster.worker_nodes, key=lambda node: str(node.node_id))
            node = self._choice.choice(nodes)
            os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            self._cluster.remove_node(node, allow_graceful=False)
            return partial(add_node, self._cluster, _NODE_CPUS)
        if part == "head":
            if self._head is None or not self.is_running:
                return None
            self._head.kill()
            self._head.wait()
            return self.start_head
        alive = sorted((each for each in self._parts(part) if each), key=lambda each: each.pid)
        if not alive:
            return None
        try:
            os.kill(self._choice.choice(alive).pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return lambda: None  # The run itself replaces it.

    def _parts(self, part: str) -> list[Any]:
        """The processes of a kind on the nodes."""
        word = "etude.processes.team" if part == "learner" else "etude.processes.runner"
        found = [each for each in self._on_nodes() if word in _command(each)]
        return [each.parent() for each in found] if part == "actor" else found

    def _on_nodes(self) -> Iterator[Any]:
        for node in self._cluster.worker_nodes:
            try:
                raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
                yield from raylet.children(recursive=True)
            except psutil.NoSuchProcess:
                continue

    def commit_after(self, moment: float) -> float | None:
        """When the first step after a moment was committed."""
        try:
            uri = f"file:{run_path(self.folder)}/run.db?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=10)) as journal:
                query = "SELECT min(created) FROM steps WHERE created > ?"
                (first,) = journal.execute(query, (moment,)).fetchone()
        except sqlite3.OperationalError:
            return None  # There is no journal yet.
        return None if first is None else float(first)

    def trained(self) -> list[Path]:
        """The job that learners train, and its checkpoints; none that is being written."""
        folder = run_path(self.folder) / "learners"
        checkpoints = (each for each in folder.glob("job-*/step-*") if each.name[5:].isdecimal())
        return sorted([*folder.glob("job-*"), *checkpoints])

    def tails(self) -> str:
        """The ends of the logs, to show why nothing happens."""
        logs = [self._head_log, *sorted((run_path(self.folder) / "runners").glob("*.log"))]
        texts = [f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs if log.exists()]
        return "\n".join([f"head: {'running' if self.is_running else self.exit_code}", *texts])


def _command(process: Any) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class _Killed:
    """One run, killed again and again until it has ended."""

    def __init__(self, operator: _Operator, bag: list[str], choice: random.Random, ends: _Ends) -> None:
        self._operator, self._bag, self._choice, self._ends = operator, bag, choice, ends
        self.kills = self._failures = self._in_a_row = 0
        self._trained = list[Path]()

    def play(self, parts: tuple[str, ...], most: int) -> None:
        """Kill parts of the run until it has ended, up to a limit."""
        with self._operator.started():
            self._await_commit(0.0, "start")
            while not self._is_over():
                if self.kills >= most:
                    self._await_commit(time.time(), "the last kill")
                    continue
                end = time.monotonic() + self._choice.uniform(*_PAUSES)
                while self._operator.is_running and time.monotonic() < end:
                    time.sleep(_LOOK_SECONDS)
                if self._operator.is_running:
                    self._kill(parts, most)

    def _kill(self, parts: tuple[str, ...], most: int) -> None:
        """Kill, repair, and wait for the next commit; now and then another kill comes before that."""
        first, killed = time.time(), list[str]()
        while not killed or (self.kills < most and self._choice.random() < _FOLLOWED):
            if not self._bag:
                self._bag += self._choice.sample(parts, len(parts))
            part = self._bag.pop()
            if "learner" in parts:
                self._await_checkpoint()
            end = time.monotonic() + _TARGET_SECONDS
            # Learners are there while a job trains.
            while not (repair := self._operator.kill(part)):
                if not self._operator.is_running or time.monotonic() > end:
                    self._bag.insert(0, part)
                    break
                time.sleep(_LOOK_SECONDS)
                first = first if killed else time.time()
            if repair is None:
                break
            killed.append(part)
            self.kills += 1
            self._in_a_row += 1
            time.sleep(self._choice.uniform(0.0, _REPAIR_SECONDS))
            repair()
        self._ends.kills.update(killed)
        if killed:
            recovery = self._await_commit(first, " and ".join(killed))
            self._ends.recoveries += [] if recovery is None else [recovery]

    def _await_checkpoint(self) -> None:
        """Wait where one more kill would fail the job, until it has another checkpoint, or is another one."""
        end = time.monotonic() + _COMMIT_SECONDS
        while (found := self._operator.trained()) == self._trained and self._in_a_row == _IN_A_ROW:
            if not self._operator.is_running or time.monotonic() > end:
                break
            time.sleep(_LOOK_SECONDS)
        self._in_a_row *= found == self._trained
        self._trained = found

    def _await_commit(self, moment: float, what: str) -> float | None:
        """Seconds from a moment to the next commit; None where the run ends without another one.

        Where nothing is committed for too long, the ends of the logs are kept and the head is killed.
        """
        end = time.monotonic() + _COMMIT_SECONDS
        while time.monotonic() < end:
            is_running = self._operator.is_running
            if (committed := self._operator.commit_after(moment)) is not None:
                return committed - moment
            if not is_running:
                return None
            time.sleep(_LOOK_SECONDS)
        self._fail(f"nothing was committed for {_COMMIT_SECONDS:g} s after {what}")
        self._operator.kill("head")
        self._operator.start_head()
        return None

    def _is_over(self) -> bool:
        """Whether the run is over. A head that ended by itself, or hung, is started again, a few times."""
        if self._operator.is_running or self._operator.exit_code == 0:
            return not self._operator.is_running or self._failures > _MOST_FAILURES
        self._fail(f"the head ended with exit code {self._operator.exit_code}")
        if self._failures <= _MOST_FAILURES:
            self._operator.start_head()
            return False
        return True

    def _fail(self, what: str) -> None:
        self._failures += 1
        self._ends.problems.append(f"{what}\n{self._operator.tails()}")


def kill_on_cluster(scene: Scene) -> Figures:
    """So many kills over several runs, each of which ends before the next begins."""
    if importlib.util.find_spec("ray") is None:
        return {"problems": ["it needs the extra `ray`: pip install 'etude[ray]'"]}
    kills, ends = _KILLS[scene.quick], _Ends()
    with start_cluster(_NODE_CPUS, _NODE_CPUS) as cluster:
        for kind in _KINDS:
            folder = scene.folder / f"cluster-{kind.learners}"
            _play(kind, folder, cluster, max(1, round(kind.share * kills)), scene, ends)
    return {
        "kills": ends.kills.total(),
        "kills_by_part": dict(ends.kills),
        "runs": ends.runs,
        "doubled": ends.paid_twice,
        "requests": ends.requests,
        "unequal_ends": len(ends.unequal),
        "recovery_s_p50": round(statistics.median(ends.recoveries), 2) if ends.recoveries else None,
        "problems": [*ends.unequal, *ends.problems],
    }


def _play(kind: _Kind, folder: Path, cluster: Any, most: int, scene: Scene, ends: _Ends) -> None:
    """A run that nobody disturbs, and as many that are killed as it takes."""
    choice, bag = scene.choice(kind.name), list[str]()
    whole = _Operator(folder / "whole", cluster, choice, kind)
    _Killed(whole, bag, choice, ends).play(kind.parts, 0)
    if ends.problems:
        raise SystemExit(f"the run that nobody disturbs fails: {ends.problems}")
    expected, kills, runs = contents(whole.folder), 0, 0
    while kills < most and runs < most:
        operator = _Operator(folder / f"run-{runs}", cluster, choice, kind)
        killed = _Killed(operator, bag, choice, ends)
        killed.play(kind.parts, min(most - kills, _RUN_KILLS))
        kills, runs = kills + killed.kills, runs + 1
        requests = [json.loads(line) for line in operator.paid_log.read_text().splitlines()]
        ends.paid_twice += sum(request["again"] for request in requests)
        ends.requests += len(requests)
        if found := differences(expected, contents(operator.folder)):
            ends.unequal.append("; ".join(found[:8]))
        scene.note(f"{kind.name}: {kills} kills in {runs} runs, {len(found)} steps of the last one differ")
    ends.runs += runs
