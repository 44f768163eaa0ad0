"""The head's side of runners: answers them, shares episodes among them, and notices dead ones."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from etude.core.call import Call, Usage
from etude.core.errors import EtudeError, RequestError
from etude.core.interfaces import Engine, PortableEngine, innermost
from etude.core.job import ModelVersion
from etude.engines.ledger import Ledger
from etude.engines.meter import Purpose, use_purpose
from etude.engines.programs import Child, ProcessEnd
from etude.processes.link import (
    CallCache,
    Disconnected,
    Notify,
    RunnerLink,
    Stream,
    decode_request,
    encode_answer,
)
from etude.processes.shipping import example_to_json
from etude.rollout.collector import EpisodeJob
from etude.store.journal import Journal
from etude.wire.retries import RetryCount, count_retries

_CLOSING_SECONDS = 5.0


@dataclass(frozen=True)
class Head:
    """The parts of a run that all runners share."""

    journal: Journal
    engines: Mapping[str, Engine]
    """The run's models, by name."""
    sampled_here: frozenset[str]
    """The models that runners sample through the head. Runners build the others themselves."""
    patience: float
    """Seconds that a runner's event loop may stall."""
    ledger: Ledger
    """Counts what runners ask models for."""
    answers: defaultdict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Answered calls of each episode under way. If its runner dies, the episode asks again."""

    async def answer(self, asked: Call, count: RetryCount) -> Call:
        """Return the call with its answer, sampled only if there is none yet. Raises EngineError."""
        answers = self.answers[asked.request.conversation] if asked.request.conversation else []
        for call in answers:
            # The key first: it differs unless the agent has set a seed.
            same_key = call.request.key == asked.request.key and call.model == asked.model
            if same_key and call.request == asked.request:
                count.add(call.retried, call.waited)
                return call
        completion = await self.engines[asked.model].complete(asked.request)
        request = replace(asked.request, earlier=(), on_delta=None)
        call = replace(
            asked, request=request, completion=completion, retried=dict(count.causes), waited=count.waited
        )
        answers.append(call)
        return call

    def forget(self, episode_id: str) -> None:
        """Drop the answers of an episode that is over."""
        self.answers.pop(episode_id, None)


class RunnerDied(EtudeError):
    """A runner's process has ended."""

    def __init__(self, end: ProcessEnd, *, is_late: bool = False) -> None:
        super().__init__(end.how)
        self.end = end
        self.is_late = is_late
        """True if it was killed because its event loop stalled. An episode alone in it is then the cause."""
        self.playing: frozenset[str] = frozenset()
        """The ids of the episodes that were playing in it."""
        self.log = ""


class RemoteRunner:
    """A connected runner."""

    def __init__(self, head: Head, stream: Stream, process: Child, beat_seconds: float) -> None:
        """Start serving the runner and checking it every `beat_seconds`."""
        self._head = head
        self.process = process
        self._beat_seconds = beat_seconds
        self._link = RunnerLink(stream, self._answer)
        self._serving = asyncio.ensure_future(self._link.serve())
        self._beating = asyncio.ensure_future(self._beat())
        self._killed_for: RunnerDied | None = None
        self._known: defaultdict[str, CallCache] = defaultdict(dict)
        self._adopted: dict[str, ModelVersion | None] = {}
        self._died: asyncio.Task[RunnerDied] | None = None
        self._held: set[int] = set()
        """The numbers of its calls' reservations in the ledger."""
        self.playing: set[str] = set()
        """The ids of the episodes that are playing in it."""
        self.has_played = False
        self.calls: dict[str, tuple[int, float]] = {}
        """Its calls that wait for an answer, by model: their number, and the oldest one's age in seconds."""

    @property
    def is_alive(self) -> bool:
        """Whether it still answers."""
        return not self._serving.done() and self._killed_for is None

    async def build(self, parameters: dict[str, Any]) -> None:
        """Have it build the agent. Raises the errors of the build, and RunnerDied."""
        await self._ask("build", parameters)

    async def play(self, job: EpisodeJob, steps: Mapping[str, Any]) -> None:
        """Have it play an episode with these stored `steps`. Raises RunnerDied, StoreError."""
        self.playing.add(job.id)
        self.has_played = True
        parameters = {
            "id": job.id,
            "generation": job.generation,
            "sampling": dict(job.sampling),
            "widths": job.widths,
            "example": example_to_json(job.example),
            "steps": dict(steps),
        }
        try:
            await self._tell_versions()
            await self._ask("play", parameters)
        finally:
            self.playing.discard(job.id)
            self._known.pop(job.id, None)

    async def stop(self) -> None:
        """Close the connection, so that the runner ends. Kill it if it does not."""
        self._beating.cancel()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING_SECONDS):
                    await self._link.close()
                    await self.process.wait()
        finally:
            self.process.kill()
            await self.process.wait()
        await asyncio.gather(self._beating, self._serving, return_exceptions=True)

    async def _ask(self, method: str, parameters: dict[str, Any]) -> Any:
        try:
            return await self._link.ask(method, parameters)
        except Disconnected:
            if self._died is None:
                self._died = asyncio.ensure_future(self._death(frozenset(self.playing)))
            raise await asyncio.shield(self._died) from None

    async def _death(self, playing: frozenset[str]) -> RunnerDied:
        """Return why it died, once nothing from it is pending."""
        await self._serving
        while self._held:
            # Nobody knows whether these calls were answered.
            self._head.ledger.release(self._held.pop())
        self._beating.cancel()
        try:
            async with asyncio.timeout(_CLOSING_SECONDS):
                end = await self.process.wait()
        except TimeoutError:
            self.process.kill()
            end = await self.process.wait()
            end = end if end.is_lost else ProcessEnd("closed its connection")
        await self._head.journal.flush()  # So its last commits can be read.
        death = self._killed_for or RunnerDied(end)
        death.playing, death.log = playing, str(self.process.log)
        return death

    async def _answer(self, method: str, parameters: dict[str, Any], note: Notify) -> Any:
        match method, parameters:
            case "sample", _:
                return await self._sample(parameters, note)
            case "hold", {"model": model, "most": most}:
                number = await self._head.ledger.hold(model, Usage(*most))
                self._held.add(number)
                return number
            case "settle", {"number": number, "model": model}:
                self._held.discard(number)
                purpose, usage = Purpose(*parameters["purpose"]), Usage(*parameters["usage"])
                await self._head.ledger.settle(number, model, purpose, usage)
            case "put", {"key": key, "value": value}:
                if not any(key == each or key.startswith(f"{each}/") for each in self.playing):
                    raise RequestError(f"a runner may only write steps of its own episodes, not {key!r}")
                await self._head.journal.put(key, value)
                await self._tell_versions()
            case _:
                raise RequestError(f"the head does not know the method {method!r}")
        return None

    async def _sample(self, parameters: dict[str, Any], note: Notify) -> Any:
        conversation = parameters["conversation"]
        known = self._known[conversation] if conversation in self.playing else {}
        asked = decode_request(parameters, known)
        request = asked.request
        if parameters["streams"]:
            request = replace(request, on_delta=lambda delta: note(["delta", asdict(delta)]))
        with count_retries() as count, use_purpose(Purpose(*parameters["purpose"])):
            try:
                call = await self._head.answer(replace(asked, request=request), count)
            finally:
                if count.causes:
                    note(["tried", [dict(count.causes), count.waited]])
        known[parameters["number"]] = call
        return encode_answer(call, known, parameters["earlier"])

    async def _tell_versions(self) -> None:
        """Have the engines that the runner built adopt the versions of the head's engines."""
        news = {
            name: engine.adopted
            for name, engine in ((name, innermost(each)) for name, each in self._head.engines.items())
            if name not in self._head.sampled_here and isinstance(engine, PortableEngine)
            if engine.adopted is not None and engine.adopted != self._adopted.get(name)
        }
        if news:
            self._adopted |= news
            await self._ask("adopt", {name: each.model_dump(mode="json") for name, each in news.items()})

    async def _beat(self) -> None:
        """Watch the runner's event loop, and kill the runner if the loop stalls for too long."""
        head, asked_at = self._head, time.monotonic()
        ping: asyncio.Task[Any] | None = None
        while not self._serving.done():
            await asyncio.sleep(self._beat_seconds)
            if ping is None or ping.done():
                asked_at = time.monotonic()
                ping = asyncio.ensure_future(self._greet())
            elif time.monotonic() - asked_at > head.patience:
                end = ProcessEnd(f"did not answer for {head.patience:g} s; something in it blocks")
                self._killed_for = RunnerDied(end, is_late=True)
                self.process.kill()

    async def _greet(self) -> None:
        with contextlib.suppress(Disconnected, RunnerDied):
            self.calls = (await self._link.ask("ping", {}))["calls"]
            await self._tell_versions()


@dataclass(slots=True, eq=False)
class RunnerSlot:
    """A place where one runner at a time runs."""

    number: int
    """From 1; also the name of its log."""
    runner: RemoteRunner | None = None
    process: Child | None = None
    """The process of its current or starting runner."""
    since: float | None = None
    """When the runner began to start, or became ready, by the monotonic clock."""
    episodes: int = 0
    is_exclusive: bool = False
    """Whether one episode has it alone."""
    is_closed: bool = False
    """Whether it can have no runner any more, as after the loss of a machine."""
    starting: asyncio.Task[None] | None = None
    """Starts its runner. Meanwhile no episode gets the place."""

    @property
    def state(self) -> str:
        """`ready`, `starting`, `closed` if it can have no runner, `idle` before the first episode."""
        if self.runner is not None and self.runner.is_alive:
            return "ready"
        return "starting" if self.starting is not None else "closed" if self.is_closed else "idle"

    @property
    def is_open(self) -> bool:
        """Whether further episodes may get it, if it has room."""
        return not (self.is_closed or self.is_exclusive or self.starting)


class RunnerSlots:
    """Places for a bounded number of episodes each. Each gets the emptiest place, or a place for itself."""

    def __init__(self, count: int, episodes_each: int) -> None:
        self._all = tuple(RunnerSlot(number) for number in range(1, count + 1))
        self._episodes_each = episodes_each
        self._waiting_alone = 0
        self._changed: asyncio.Future[None] | None = None
        """Done whenever a place may have room. It has the error of a runner that fails to start."""

    def __iter__(self) -> Iterator[RunnerSlot]:
        return iter(self._all)

    @asynccontextmanager
    async def take(self, *, alone: bool) -> AsyncIterator[RunnerSlot]:
        """Take a place with room for an episode, or an empty one that this episode has alone.

        Raises the error of a runner that fails to start while this waits.
        """
        self._waiting_alone += alone
        try:
            while (place := self._choose(alone=alone)) is None:
                if self._changed is None:
                    self._changed = asyncio.get_running_loop().create_future()
                await asyncio.shield(self._changed)
        finally:
            self._waiting_alone -= alone
            self._note_change()  # The place kept free for this one.
        place.episodes += 1
        place.is_exclusive = alone
        try:
            yield place
        finally:
            place.episodes -= 1
            place.is_exclusive = False
            self._note_change()

    def hold(self, place: RunnerSlot, starting: asyncio.Task[None]) -> None:
        """Hold back this place while its runner starts. On failure, raise its error in all waiters."""

        def offer(task: asyncio.Task[None]) -> None:
            place.starting = None
            self._note_change(None if task.cancelled() else task.exception())

        place.starting = starting
        starting.add_done_callback(offer)

    def _choose(self, *, alone: bool) -> RunnerSlot | None:
        """Return the emptiest place with room, or None."""
        most = 1 if alone else self._episodes_each
        places = [place for place in self._all if place.is_open and place.episodes < most]
        places.sort(key=lambda place: place.episodes)
        if not alone and self._waiting_alone and not any(place.is_exclusive for place in self._all):
            del places[:1]  # The emptiest one is kept free for an episode that wants one alone.
        return places[0] if places else None

    def _note_change(self, error: BaseException | None = None) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and error is None:
            changed.set_result(None)
        elif changed is not None and error is not None:
            changed.set_exception(error)
            changed.exception()  # Retrieve the exception: the waiters may have been cancelled.
