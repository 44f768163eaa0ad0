"""A pool of runners, which share the episodes. The pool finds out which episode kills a runner.

When a runner dies, its unfinished episodes run again, each alone, because at most one of them was to blame.
They keep their committed steps. An episode whose runner dies twice while it is alone has failed.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from etude.config.builder import Builder
from etude.config.schema import Config
from etude.core.episode import EpisodeRecord, Failure
from etude.core.errors import EtudeError, StoreError
from etude.core.interfaces import Engine, PortableEngine, innermost
from etude.core.process import allow_open_files
from etude.core.threads import end_tasks
from etude.engines.ledger import Ledger
from etude.engines.programs import Launcher, LocalLauncher, NoRoom, last_exception, last_lines
from etude.processes.head import Head, RemoteRunner, RunnerDied, RunnerSlot, RunnerSlots
from etude.processes.link import Disconnected, RunnerInvitation, Stream, shake_hands
from etude.processes.shipping import build_scorer, config_to_json
from etude.processes.team import TeamRun
from etude.rollout.collector import EpisodeJob
from etude.rollout.evaluation import make_item
from etude.rollout.evaluator import Scorer
from etude.store.episodes import CallReader, call_key, encode_episode, read_episode
from etude.store.run_folder import RunFolder

_START_SECONDS = 300.0
"""Seconds for one start of a runner, and for further starts of a runner that other programs kill."""
_PAUSE_SECONDS = 1.0
_DEATHS = 2
"""The number of deaths of its runner, alone with it, that make an episode the cause."""
_BEAT_SECONDS = 0.25
"""Seconds between two checks of a runner."""
_BEATS_PER_SECOND = 100
"""The most checks per second of all runners together. A check takes the head up to half a millisecond. At
four per second, a thousand idle runners would use all of its time and more."""


@dataclass(eq=False)
class RunnerPool:
    """Plays episodes in runners. Each runner plays a bounded number of them at a time."""

    head: Head
    launcher: Launcher
    scorer: Scorer
    """Tells which scores are missing. Runners have their own."""
    build: dict[str, Any]
    """Parameters for building the agent and its scorer in a runner."""
    logs: Path
    """The folder of the files with their output."""
    runners: int
    episodes_each: int
    playing: dict[str, float] = field(default_factory=dict)
    """The episodes given to runners, and their start times by the monotonic clock."""

    def __post_init__(self) -> None:
        self.places = RunnerSlots(self.runners, self.episodes_each)
        self._beat_seconds = max(_BEAT_SECONDS, self.runners / _BEATS_PER_SECOND)
        self._exits = AsyncExitStack()
        self._address = ""
        self._expected: dict[int, tuple[bytes, asyncio.Future[Stream]]] = {}
        """The key of each runner that has not connected yet, and its connection."""
        self._started = 0

    async def __aenter__(self) -> Self:
        await self._exits.__aenter__()
        allow_open_files()
        host = self.launcher.address or "127.0.0.1"
        # All runners may connect at the same moment.
        server = await asyncio.start_server(self._accept, host, 0, backlog=100 + self.runners)
        self._address = f"{host}:{server.sockets[0].getsockname()[1]}"
        self._exits.callback(server.close)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await end_tasks(*(place.starting for place in self.places if place.starting is not None))
        runners = [place.runner for place in self.places if place.runner is not None]
        try:
            await asyncio.gather(*(runner.stop() for runner in runners), return_exceptions=True)
        finally:
            await self._exits.aclose()

    async def play(self, job: EpisodeJob) -> EpisodeRecord:
        """Return the finished episode of a job, journalled with its scores.

        Raises StoreError, and EtudeError if no runner can be started.
        """
        try:
            return await self._play(job)
        finally:
            self.head.forget(job.id)

    async def _play(self, job: EpisodeJob) -> EpisodeRecord:
        deaths, suspected, is_played = 0, False, False
        while True:
            record = read_episode(self.head.journal, job.id, job.example)
            if record is not None and (record.failure is not None or not self.scorer.missing(record)):
                return record
            if is_played:
                raise StoreError(f"{self.head.journal.path} lacks {job.id}, which a runner finished")
            async with self.places.take(alone=suspected) as place:
                try:
                    runner = await self._runner_at(place, alone=suspected, fresh=deaths > 0)
                    if runner is None:
                        continue  # Another place may have room before this one has a runner.
                    self.playing[job.id] = time.monotonic()
                    # Its calls and scores, and the episode itself if only a score is missing.
                    stored = self.head.journal.get(job.id)
                    own = {} if stored is None else {job.id: stored}
                    await runner.play(job, own | dict(self.head.journal.scan(f"{job.id}/")))
                    is_played = True
                    continue
                except RunnerDied as error:
                    death = error
                    was_alone = death.playing == {job.id}
                finally:
                    self.playing.pop(job.id, None)
            if death.end.is_lost:
                continue  # The machine was lost, which no episode causes.
            suspected = True
            deaths += was_alone
            if was_alone and (deaths == _DEATHS or death.is_late):
                await self._give_up(job, death)

    async def _runner_at(self, place: RunnerSlot, *, alone: bool, fresh: bool) -> RemoteRunner | None:
        """Return the runner of a place; with `fresh` one that has played nothing.

        If there is none, start one, for which only an episode that is alone there waits. Raises EtudeError.
        """
        if place.runner is not None and fresh and place.runner.has_played:
            await place.runner.stop()
        if place.runner is not None and place.runner.is_alive:
            return place.runner
        if place.starting is None:
            self.places.hold(place, asyncio.ensure_future(self._start_at(place)))
        if alone and place.starting is not None:
            await asyncio.shield(place.starting)
            return place.runner
        return None

    async def _start_at(self, place: RunnerSlot) -> None:
        """Start the runner of a place, or close the place. Raises EtudeError, and the errors of the build."""
        end = time.monotonic() + _START_SECONDS
        place.runner = None
        while place.runner is None:
            try:
                place.runner = await self._start(place)
                place.since = time.monotonic()
            except NoRoom as error:
                self._close(place, f"cannot be started: {error}")
                return
            except TimeoutError:
                self._close(place, f"was not ready within {_START_SECONDS:g} s")
                return
            except RunnerDied as death:
                if not (death.end.is_lost or death.end.is_killed_by_others):
                    raise EtudeError(f"runner {place.number} cannot be started: {death}") from None
                if time.monotonic() >= end:
                    self._close(place, f"cannot be started: {death}")
                    return
                # The launcher may not have noticed a lost machine yet.
                await asyncio.sleep(_PAUSE_SECONDS)

    def _close(self, place: RunnerSlot, how: str) -> None:
        """Continue without a place that has no room. Raises EtudeError if no other runner is alive."""
        if not any(other.runner and other.runner.is_alive for other in self.places):
            raise EtudeError(f"runner {place.number} {how}")
        place.is_closed = True

    async def _start(self, place: RunnerSlot) -> RemoteRunner:
        """Start a runner, connect it and build its agent. Raises RunnerDied, and the errors of the build."""
        self._started += 1
        place.process, place.since = None, time.monotonic()
        number, key = self._started, secrets.token_bytes(32)
        calling: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._expected[number] = key, calling
        invitation = RunnerInvitation(self._address, number, key.hex())
        process = await self.launcher.launch(invitation, self.logs / f"{place.number}.log")
        place.process = process
        ending = asyncio.ensure_future(process.wait())
        runner: RemoteRunner | None = None
        try:
            async with asyncio.timeout(_START_SECONDS):
                begun: set[asyncio.Future[Any]] = {calling, ending}
                await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
                if not calling.done():
                    last_words = last_exception(process.log, process.begin) or last_lines(process.log)
                    end = ending.result()
                    raise RunnerDied(replace(end, how=f"{end.how}: {last_words}\nits log: {process.log}"))
                runner = RemoteRunner(self.head, calling.result(), process, self._beat_seconds)
                await runner.build(self.build)
        except BaseException:
            process.kill()
            if runner is not None:
                await runner.stop()
            await process.wait()
            raise
        finally:
            ending.cancel()
            del self._expected[number]
        return runner

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a connection from an expected runner, and close any other."""
        stream = Stream(reader, writer)
        try:
            number = await shake_hands(stream, None, lambda number: self._expected[number][0])
            self._expected[number][1].set_result(stream)
        except (KeyError, asyncio.InvalidStateError, Disconnected, TimeoutError):
            await stream.close()

    async def _give_up(self, job: EpisodeJob, death: RunnerDied) -> None:
        """Record as a failure that the episode, or its scoring, ended its process."""
        journal = self.head.journal
        record = read_episode(journal, job.id, job.example)
        reason = f"the process that played it {death}; its log: {death.log}"
        if record is not None:
            await self.scorer.give_up(make_item(record), reason.replace("played", "scored"))
            return
        prefix, reader = call_key(job.id, ""), CallReader(journal, job.id)
        names = [key.removeprefix(prefix) for key, _ in journal.scan(prefix)]
        calls = sorted(((reader.read(name), name) for name in names), key=lambda named: named[0].index)
        failed = EpisodeRecord(
            id=job.id,
            example=job.example,
            generation=job.generation,
            calls=tuple(call for call, _ in calls),
            failure=Failure(
                "timeout" if death.is_late else "died",
                reason,
                "environment" if death.end.is_killed_by_others else "agent",
            ),
        )
        await journal.put(job.id, encode_episode(failed, {call.index: name for call, name in calls}))


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines of a `cluster` block."""

    runners: Launcher | None
    """None if episodes are played as without a cluster."""
    learners: Callable[..., Any] | None = None
    """Reserves places for a team, like `ray_places`. None if jobs train in the run's own process."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the job that trains there, because only one has room at a time."""
    teams: set[TeamRun] = field(default_factory=set)
    """The teams that train now, or wait for room."""


LOGS = "runners"
"""The folder of the runners' logs in a run folder."""

_GRACE_SECONDS = 10.0
"""Seconds beyond an episode's timeout that a runner's event loop may stall."""


@asynccontextmanager
async def open_runner(
    builder: Builder,
    run: RunFolder,
    models: Mapping[str, Engine],
    given: Mapping[str, Engine],
    ledger: Ledger,
) -> AsyncIterator[RunnerPool | None]:
    """Open the runners that the config asks for, or None. They start when an episode needs them.

    `given` are the `models` that the config did not build. `ledger` counts the spending on all of them.
    Raises RequestError for a config that cannot be sent to other processes.
    """
    config, general = builder.config, builder.config.eval.general
    cluster: Cluster | None = await builder.get_cluster()
    launcher = None if cluster is None else cluster.runners
    if launcher is None and general.isolation != "process":
        yield None
        return
    workflow = await builder.get_workflow()
    seconds = general.timeout if workflow.timeout is None else workflow.timeout
    at_head = [
        name for name in models if name in given or not isinstance(innermost(models[name]), PortableEngine)
    ]
    head = Head(run.journal, models, frozenset(at_head), seconds + _GRACE_SECONDS, ledger)
    scorer = await build_scorer(builder, run.journal)
    runners = number_of_runners(config)
    episodes_per_runner = -(-general.max_concurrency // runners)
    where: Launcher = launcher or LocalLauncher()
    sent = config_to_json(config, over_network=bool(where.address), at_head=at_head)
    build: dict[str, Any] = {"config": sent, "run": str(run.path), "models": [*models], "at_head": at_head}
    build["reserves_calls"] = ledger.reserves_calls
    async with RunnerPool(
        head, where, scorer, build, logs=run.path / LOGS, runners=runners, episodes_each=episodes_per_runner
    ) as pool:
        yield pool


def number_of_runners(config: Config) -> int:
    """Return the configured number of runners, or one per core; never more than concurrent episodes."""
    general = config.eval.general
    wanted = (config.cluster and config.cluster.runners) or general.runners
    return min(wanted or os.cpu_count() or 1, general.max_concurrency)
