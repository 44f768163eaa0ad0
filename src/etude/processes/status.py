"""The current status of a run, published in its folder, and the watchdog that looks for progress in it.

If a run makes no progress, the watchdog says what the run waits for, and at last ends the run.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from etude.config.schema import StallConfig
from etude.core.errors import StalledError, StoreError
from etude.core.interfaces import Engine, ProgressSums
from etude.core.secrets import mask_secrets
from etude.core.stats import shown_seconds
from etude.core.threads import end_tasks
from etude.processes.pool import Cluster, RunnerPool
from etude.rollout.collector import Collector
from etude.store.files import open_draft
from etude.store.run_folder import RunFolder
from etude.store.status import STATUS, JournalStatus, ModelStatus, RunnerStatus, RunStatus, Team, Wait

_SECONDS = 1.0


@dataclass(frozen=True)
class Parts:
    """The parts of a run that its status is made from."""

    run: RunFolder
    counts: ProgressSums
    collector: Collector
    pool: RunnerPool | None
    """The runners; None if the head plays the episodes itself."""
    engines: Mapping[str, Engine]
    cluster: Cluster | None = None


@asynccontextmanager
async def publish_status(parts: Parts) -> AsyncIterator[None]:
    """Publish the run's status in its folder during the block."""
    publishing = asyncio.ensure_future(_publish(parts))
    try:
        yield
    finally:
        await end_tasks(publishing)
        (parts.run.path / STATUS).unlink(missing_ok=True)


async def _publish(parts: Parts) -> None:
    since = time.time()
    while True:
        status = snapshot(parts, since)
        writing = asyncio.ensure_future(asyncio.to_thread(_write, parts.run.path / STATUS, status))
        try:
            await asyncio.shield(writing)
        except StoreError:
            pass  # The journal reports a full disk.
        finally:
            # A thread cannot be cancelled, and must not write once the status is deleted.
            await asyncio.gather(writing, return_exceptions=True)
        await asyncio.sleep(_SECONDS)


def _write(path: Path, status: RunStatus) -> None:
    """Write the status atomically. It is not synced: a status is useless after a power cut."""
    with open_draft(path, sync=False) as draft:
        draft.write_text(mask_secrets(status.model_dump_json(indent=1)) + "\n", encoding="utf-8")


def snapshot(parts: Parts, since: float) -> RunStatus:
    """Return the current status of the run. `since` is the start of its process, in Unix seconds."""
    counts, pool = parts.counts, parts.pool
    begun = parts.collector.playing if pool is None else pool.playing
    unfinished = None if counts.phase_total is None else max(0, counts.phase_total - counts.episodes)
    runners = [
        RunnerStatus(
            number=place.number,
            node="" if place.process is None else place.process.node,
            state=place.state,
            seconds=None if place.since is None else time.monotonic() - place.since,
            episodes=place.episodes,
        )
        for place in (() if pool is None else pool.places)
    ]
    learners = [
        Team(wanted=team.size, nodes=[child.node for child in team.children.values()], since=team.since)
        for team in (() if parts.cluster is None else parts.cluster.teams)
    ]
    status = RunStatus(
        run=parts.run.name,
        pid=os.getpid(),
        host=socket.gethostname(),
        at=time.time(),
        since=since,
        phase=counts.phase_name,
        phase_seconds=time.monotonic() - counts.phase_started,
        epoch=counts.epoch,
        num_epochs=counts.num_epochs,
        expected=counts.phase_total,
        finished=counts.episodes,
        playing=len(begun),
        waiting=None if unfinished is None else max(0, unfinished - len(begun)),
        totals=counts.totals.model_copy(),
        runners=runners,
        learners=learners,
        models=_models(parts),
        journal=JournalStatus.model_validate(parts.run.journal.writer, from_attributes=True),
    )
    return status.model_copy(update={"waits": _waits(status, begun)})


def _models(parts: Parts) -> list[ModelStatus]:
    """Return the calls of each model, as counted by the processes that make them."""
    calls = [parts.collector.calls_under_way()]
    if parts.pool is not None:
        runners = [place.runner for place in parts.pool.places if place.runner is not None]
        calls = [runner.calls for runner in runners if runner.is_alive]
    models = []
    for name, engine in parts.engines.items():
        figures = [each[name] for each in calls if name in each]
        models.append(
            ModelStatus(
                name=name,
                version=engine.version,
                waiting=sum(count for count, _ in figures),
                oldest=max((age for _, age in figures), default=None),
            )
        )
    return models


def _waits(status: RunStatus, begun: Mapping[str, float]) -> list[Wait]:
    """Return everything that the run waits for now, the longest wait first. `begun` are its episodes."""
    waits = [
        Wait(
            what=f"runner {each.number} to start" + (f" on {each.node}" if each.node else ": not placed yet"),
            seconds=each.seconds or 0.0,
        )
        for each in status.runners
        if each.state == "starting"
    ]
    waits += [
        Wait(what=f"room for {team.wanted} learners on the cluster", seconds=time.time() - team.since)
        for team in status.learners
        if len(team.nodes) < team.wanted
    ]
    for model in status.models:
        if model.waiting:
            what = f"{_number(model.waiting, 'answer')} of model '{model.name}'"
            waits.append(Wait(what=what, seconds=model.oldest or 0.0))
    if begun and not waits:
        what = f"{_number(len(begun), 'episode')} that wait for no model: agents, tools, evaluators"
        waits.append(Wait(what=what, seconds=time.monotonic() - min(begun.values())))
    # While episodes are collected, they show what the run waits for.
    if not begun and not waits and status.phase not in ("collecting", "validating", "evaluating"):
        waits.append(Wait(what=status.phase, seconds=status.phase_seconds))
    if status.journal.waiting:
        what = f"the disk, for {_number(status.journal.waiting, 'write')}"
        waits.append(Wait(what=what, seconds=status.journal.waiting_seconds))
    return sorted(waits, key=lambda wait: -wait.seconds)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


_LOOKS = 20
"""The number of looks during `say_after`."""


class Watchdog:
    """The watchdog of a run. During a training job, the job's own limit applies instead."""

    def __init__(self, parts: Parts, config: StallConfig) -> None:
        self._parts = parts
        self._config = config
        self._since = time.time()
        self._jobs = 0
        self._pulse: object = None
        self._moved = time.monotonic()
        self._said = 0
        """The number of warnings since the last progress."""
        self._diagnosis = ""

    @contextmanager
    def waiting_for_job(self) -> Iterator[None]:
        """Mark that the block waits for a training job, which may show nothing for hours."""
        self._jobs += 1
        try:
            yield
        finally:
            self._jobs -= 1
            self._note_progress()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the run during the block. Raises StalledError if the run is ended for lack of progress."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                looking = asyncio.ensure_future(self._look(limit))
                try:
                    yield
                finally:
                    await end_tasks(looking)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StalledError(
                f"{self._diagnosis} The run has ended, and nothing in the journal is lost: fix what it "
                "waited for and resume it; `stall.end_after` sets how long it waits"
            ) from error

    async def _look(self, limit: asyncio.Timeout) -> None:
        """Look periodically, and expire `limit` to end the run."""
        say_after = self._config.say_after
        pause, shown = say_after / _LOOKS, shown_seconds(say_after)
        blocked = f"the event loop has been blocked for {shown}: code that runs on it waits or computes."
        while True:
            asleep = time.monotonic()
            # A thread says it, because nothing else runs while the loop is blocked, which may be for ever.
            warning = threading.Timer(pause + say_after, self._warn, [blocked])
            warning.daemon = True
            warning.start()
            try:
                await asyncio.sleep(pause)
            finally:
                warning.cancel()
            # Waiting does not count while the process was stopped or its event loop blocked.
            self._moved += time.monotonic() - asleep - pause
            if self._should_end():
                limit.reschedule(asyncio.get_running_loop().time())
                return

    def _should_end(self) -> bool:
        """Warn if nothing has progressed for long. Return whether to end the run."""
        status = snapshot(self._parts, self._since)
        # It changes whenever the run makes progress.
        pulse = (
            status.phase,
            status.epoch,
            status.totals,
            status.journal.committed,
            tuple((runner.number, runner.node, runner.state) for runner in status.runners),
            tuple((team.since, len(team.nodes)) for team in status.learners),
            tuple((model.name, model.version) for model in status.models),
        )
        if pulse != self._pulse or self._jobs:
            self._pulse = pulse
            self._note_progress()
            return False
        silent, episode = time.monotonic() - self._moved, self._parts.collector.timeout
        ends = self._config.end_after
        if ends is not None:  # A run is not ended before two timeouts of an episode, or ever without one.
            ends = None if episode is None else max(ends, 2 * episode)
        is_over = ends is not None and silent >= ends
        if is_over or silent >= self._config.say_after * 2**self._said:
            self._said += 1
            waits = [f"{wait.what} ({shown_seconds(wait.seconds)})" for wait in status.waits]
            listed = "; ".join(waits) or status.phase
            self._diagnosis = f"nothing has moved for {shown_seconds(silent)}; the run waits for {listed}."
            self._warn(self._diagnosis + " The run ends." * is_over)
        return is_over

    def _warn(self, text: str) -> None:
        self._parts.counts.message(f"{text} To see where: py-spy dump --pid {os.getpid()}", warning=True)

    def _note_progress(self) -> None:
        if self._said:
            silent = shown_seconds(time.monotonic() - self._moved)
            self._parts.counts.message(f"the run moves again after {silent}")
        self._moved, self._said = time.monotonic(), 0
