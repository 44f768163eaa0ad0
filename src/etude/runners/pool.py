"""A pool of runners: episodes are shared out among them, and whatever one of them dies of is found out.

Episodes that were under way in a runner that died are run again, alone: all but one of them were innocent.
What they had committed they have again. An episode whose runner dies twice while it is alone has failed.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.core.episode import EpisodeRecord, Failure
from etude.core.errors import EtudeError, StoreError
from etude.rewards.evaluation import item_of
from etude.rewards.scorer import Scorer
from etude.rollout.collector import EpisodeJob
from etude.runners.frames import Disconnected, Stream, accept
from etude.runners.head import Head, RemoteRunner, RunnerDied
from etude.runners.process import Launcher, ProcessEnd, RunnerProcess
from etude.runners.program import Invitation
from etude.store.encode import encode_episode
from etude.store.episodes import CallReader, call_key, read_episode

_START_SECONDS = 300.0
_STARTS = 3
"""How often a runner is started for an episode before that is given up."""
_DEATHS = 2
"""Of its runner, while it is alone there, make an episode the cause."""


@dataclass(slots=True)
class Place:
    """Where one runner at a time runs."""

    number: int
    """From 1; also the name of its log."""
    runner: RemoteRunner | None = None
    episodes: int = 0
    is_exclusive: bool = False
    """Whether one episode has it alone."""
    is_closed: bool = False
    """Whether there is no room for its runner any more, as after the loss of a machine."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class RunnerPool:
    """Plays episodes in runners, each of which plays a bounded number of them at a time."""

    def __init__(
        self,
        head: Head,
        launcher: Launcher,
        scorer: Scorer,
        build: Mapping[str, Any],
        *,
        runners: int,
        episodes_each: int,
    ) -> None:
        """`build` is from what a runner builds the agent; `scorer` is the one that runners score with."""
        self._head = head
        self._launcher = launcher
        self._scorer = scorer
        self._build = dict(build)
        self._places = [Place(number) for number in range(1, runners + 1)]
        self._episodes_each = episodes_each
        self._changed = asyncio.Condition()
        self._want_alone = 0
        self._exits = AsyncExitStack()
        self._address = ""
        self._keys: dict[int, bytes] = {}
        self._calling: dict[int, asyncio.Future[Stream]] = {}
        self._started = 0

    async def __aenter__(self) -> RunnerPool:
        await self._exits.__aenter__()
        if self._launcher.address:
            server = await asyncio.start_server(self._called, self._launcher.address, 0)
            self._address = f"{self._launcher.address}:{server.sockets[0].getsockname()[1]}"
        else:
            # A folder that only this user may enter; and short, as the paths of sockets have to be.
            folder = self._exits.enter_context(tempfile.TemporaryDirectory(prefix="etude-"))
            self._address = str(Path(folder) / "head")
            server = await asyncio.start_unix_server(self._called, self._address)
        self._exits.callback(server.close)
        return self

    async def __aexit__(self, *exc: object) -> None:
        runners = [place.runner for place in self._places if place.runner is not None]
        try:
            await asyncio.gather(*(runner.stop() for runner in runners), return_exceptions=True)
        finally:
            await self._exits.aclose()

    async def play(self, job: EpisodeJob) -> EpisodeRecord:
        """The finished episode of a job, in the journal with its scores.

        Raises StoreError, and EtudeError when no runner can be started.
        """
        try:
            return await self._play(job)
        finally:
            self._head.answers.pop(job.id, None)

    async def _play(self, job: EpisodeJob) -> EpisodeRecord:
        deaths, suspected, played = 0, False, False
        while True:
            record = read_episode(self._head.journal, job.id, job.example)
            if record is not None and (record.failure is not None or not self._scorer.missing(record)):
                return record
            if played:
                raise StoreError(f"{self._head.journal.path}: a runner finished {job.id}, which is not there")
            async with self._place(alone=suspected) as place:
                try:
                    runner = await self._runner_at(place, fresh=deaths > 0)
                    await runner.play(job, dict(self._head.journal.scan(f"{job.id}/")))
                    played = True
                    continue
                except RunnerDied as error:
                    death = error
                    was_alone = death.playing == {job.id}
            if death.end.is_lost:
                continue  # With its machine: no episode has done that.
            suspected = True
            deaths += was_alone
            if was_alone and (deaths == _DEATHS or death.is_certain):
                await self._give_up(job, death)

    @asynccontextmanager
    async def _place(self, *, alone: bool) -> AsyncIterator[Place]:
        """A place with room for an episode, or with none in it but this one."""
        async with self._changed:
            self._want_alone += alone
            try:
                while (place := self._free_place(alone)) is None:
                    await self._changed.wait()
            finally:
                self._want_alone -= alone
            place.episodes += 1
            place.is_exclusive = alone
        try:
            yield place
        finally:
            place.episodes -= 1
            place.is_exclusive = False
            async with self._changed:
                self._changed.notify_all()

    def _free_place(self, alone: bool) -> Place | None:
        open_places = sorted(
            (place for place in self._places if not place.is_exclusive and not place.is_closed),
            key=lambda place: (place.episodes, place.number),
        )
        if alone:
            return next((place for place in open_places if place.episodes == 0), None)
        if self._want_alone and not any(place.is_exclusive for place in self._places):
            open_places = open_places[1:]  # The emptiest one is kept free for whoever wants one alone.
        return next((place for place in open_places if place.episodes < self._episodes_each), None)

    async def _runner_at(self, place: Place, *, fresh: bool) -> RemoteRunner:
        """The runner of a place, started where there is none; with `fresh` one that has played nothing."""
        async with place.starting:
            if place.runner is not None and fresh and place.runner.has_played:
                await place.runner.stop()
            for attempt in range(1, _STARTS + 1):
                if place.runner is not None and place.runner.is_alive:
                    break
                place.runner = None
                try:
                    place.runner = await self._start(place.number)
                except TimeoutError:
                    if not any(other.runner and other.runner.is_alive for other in self._places):
                        raise EtudeError(
                            f"runner {place.number} was not ready within {_START_SECONDS:g} s"
                        ) from None
                    place.is_closed = True
                    raise RunnerDied(ProcessEnd("found no room", is_lost=True)) from None
                except RunnerDied as death:
                    if attempt == _STARTS or not (death.end.by_others or death.end.is_lost):
                        raise EtudeError(f"runner {place.number} cannot be started: {death}") from None
            assert place.runner is not None
            return place.runner

    async def _start(self, place: int) -> RemoteRunner:
        """A runner that is connected and has built the agent. Raises RunnerDied, and what building raised."""
        self._started += 1
        number, key = self._started, secrets.token_bytes(32)
        calling: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._keys[number], self._calling[number] = key, calling
        process = await self._launcher.launch(Invitation(self._address, number, key.hex()), place)
        runner: RemoteRunner | None = None
        try:
            async with asyncio.timeout(_START_SECONDS):
                stream = await _first_of(calling, process)
                runner = RemoteRunner(self._head, stream, process)
                await runner.build(self._build)
        except BaseException:
            process.kill()
            if runner is not None:
                await runner.stop()
            await process.ended()
            raise
        finally:
            del self._keys[number], self._calling[number]
        return runner

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection from a runner that is waited for; others are closed."""
        stream = Stream(reader, writer)
        try:
            number = await accept(stream, self._keys.get)
        except (Disconnected, TimeoutError):
            await stream.close()
            return
        calling = self._calling.get(number)
        if calling is None or calling.done():
            await stream.close()
        else:
            calling.set_result(stream)

    async def _give_up(self, job: EpisodeJob, death: RunnerDied) -> None:
        """Keep as a failure that the episode, or the scoring of it, ended its process."""
        journal = self._head.journal
        record = read_episode(journal, job.id, job.example)
        reason = f"the process that played it {death}; its log: {death.log}"
        if record is not None:
            await self._scorer.give_up(item_of(record), reason.replace("played", "scored"))
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
                "environment" if death.end.by_others else "agent",
            ),
        )
        await journal.put(job.id, encode_episode(failed, {call.index: name for call, name in calls}))


async def _first_of(calling: asyncio.Future[Stream], process: RunnerProcess) -> Stream:
    """The stream of a runner once it has called. Raises RunnerDied when it ends before that."""
    ending = asyncio.ensure_future(process.ended())
    try:
        futures: set[asyncio.Future[Any]] = {calling, ending}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if calling.done():
            return calling.result()
        end = ending.result()
    finally:
        ending.cancel()
    how = f"{end.how}: {process.last_words()}\nits log: {process.log}"
    raise RunnerDied(type(end)(how, end.by_others))
