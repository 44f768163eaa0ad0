"""The head's end of a runner: answers what it asks for, sends it episodes, and sees when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from etude.budget.bill import Purpose, restored
from etude.budget.ledger import Ledger
from etude.core.call import Call, Usage
from etude.core.errors import EtudeError, RequestError
from etude.core.interfaces import Engine, KeepsConversations, Portable, bare
from etude.core.job import ModelVersion
from etude.rollout.collector import EpisodeJob
from etude.runners.link import (
    Disconnected,
    Known,
    Link,
    Note,
    Stream,
    decode_request,
    encode_answer,
    encode_delta,
)
from etude.runners.process import ProcessEnd, RunnerProcess, killed_after
from etude.runners.shipping import shipped_example
from etude.store.journal import Journal
from etude.wire.retries import RetryCount, counting_retries

_CLOSING_SECONDS = 5.0


@dataclass(frozen=True)
class Head:
    """The parts of a run that all runners share."""

    journal: Journal
    engines: Mapping[str, Engine]
    """The models of the run, by name."""
    sampled_here: frozenset[str]
    """Those that runners ask for samples of; they build the others themselves."""
    patience: float | None
    """Seconds that a runner's event loop may stand still."""
    ledger: Ledger
    """Where what runners ask models for is counted."""
    answers: defaultdict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Calls of each episode under way that were answered: a runner may die before it has committed one, and
    the episode then asks again."""

    async def answer(self, asked: Call, count: RetryCount) -> Call:
        """The call with its answer, which is sampled unless that has been done. Raises EngineError."""
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
            asked,
            request=request,
            completion=completion,
            retried=dict(count.causes),
            waited=count.waited,
        )
        answers.append(call)
        return call

    def forget(self, episode_id: str) -> None:
        """Let go of an episode that is over."""
        self.answers.pop(episode_id, None)
        for name in self.sampled_here:
            engine = bare(self.engines[name])
            if isinstance(engine, KeepsConversations):
                engine.end_conversation(episode_id)


class RunnerDied(EtudeError):
    """The process of a runner is gone."""

    def __init__(self, end: ProcessEnd, *, is_late: bool = False) -> None:
        super().__init__(end.how)
        self.end = end
        self.is_late = is_late
        """Whether it was killed because its event loop stood still; what was alone in it did that."""
        self.playing: frozenset[str] = frozenset()
        """The episodes that were played there."""
        self.log = ""


class RemoteRunner:
    """A runner that is connected."""

    def __init__(self, head: Head, stream: Stream, process: RunnerProcess, beat_seconds: float) -> None:
        """It is looked at every `beat_seconds`."""
        self._head = head
        self.process = process
        self._beat_seconds = beat_seconds
        self._link = Link(stream, self._answer)
        self._serving = asyncio.ensure_future(self._link.serve())
        self._beating = asyncio.ensure_future(self._beat())
        self._killed_for: RunnerDied | None = None
        self._known: defaultdict[str, Known] = defaultdict(dict)
        self._adopted: dict[str, ModelVersion | None] = {}
        self._died: asyncio.Task[RunnerDied] | None = None
        self._held: set[int] = set()
        """The numbers of what is held for its calls in the ledger."""
        self.playing: set[str] = set()
        """Ids of the episodes that are played there now."""
        self.has_played = False
        self.calls: dict[str, tuple[int, float]] = {}
        """Its calls that wait for an answer, by model: how many, and the age of the oldest."""

    @property
    def is_alive(self) -> bool:
        """Whether it still answers."""
        return not self._serving.done() and self._killed_for is None

    async def build(self, parameters: dict[str, Any]) -> None:
        """Have it build the agent. Raises what that raises, and RunnerDied."""
        await self._ask("build", parameters)

    async def play(self, job: EpisodeJob, steps: Mapping[str, Any]) -> None:
        """Have it play an episode of which `steps` are stored. Raises RunnerDied, StoreError."""
        self.playing.add(job.id)
        self.has_played = True
        parameters = {
            "id": job.id,
            "generation": job.generation,
            "sampling": dict(job.sampling),
            "example": shipped_example(job.example),
            "steps": dict(steps),
        }
        try:
            await self._tell_versions()
            await self._ask("play", parameters)
        finally:
            self.playing.discard(job.id)
            self._known.pop(job.id, None)

    async def stop(self) -> None:
        """Close the connection, at which it ends; it is killed where it does not."""
        self._beating.cancel()
        async with killed_after(self.process, _CLOSING_SECONDS):
            await self._link.close()
            await self.process.ended()
        await asyncio.gather(self._beating, self._serving, return_exceptions=True)

    async def _ask(self, method: str, parameters: dict[str, Any]) -> Any:
        try:
            return await self._link.ask(method, parameters)
        except Disconnected:
            raise await self._death() from None

    async def _death(self) -> RunnerDied:
        """Why it is gone, once nothing of it is under way any more."""
        if self._died is None:
            self._died = asyncio.ensure_future(self._bury(frozenset(self.playing)))
        return await asyncio.shield(self._died)

    async def _bury(self, playing: frozenset[str]) -> RunnerDied:
        await self._serving
        while self._held:
            # Whether they were answered, nobody knows.
            self._head.ledger.release(self._held.pop())
        self._beating.cancel()
        try:
            async with asyncio.timeout(_CLOSING_SECONDS):
                end = await self.process.ended()
        except TimeoutError:
            self.process.kill()
            end = await self.process.ended()
            end = end if end.is_lost else ProcessEnd("closed its connection")
        await self._head.journal.flush()  # What it had committed last is there for whoever goes on.
        death = self._killed_for or RunnerDied(end)
        death.playing, death.log = playing, self.process.log
        return death

    async def _answer(self, method: str, parameters: dict[str, Any], note: Note) -> Any:
        if method == "sample":
            return await self._sample(parameters, note)
        if method == "hold":
            return await self._hold(parameters)
        if method == "settle":
            return await self._settle(parameters)
        if method == "put":
            return await self._put(parameters["key"], parameters["value"])
        raise RequestError(f"the head does not know the method {method!r}")

    async def _hold(self, parameters: dict[str, Any]) -> int:
        number = await self._head.ledger.hold(parameters["model"], Usage(*parameters["most"]))
        self._held.add(number)
        return number

    async def _settle(self, parameters: dict[str, Any]) -> None:
        self._held.discard(parameters["number"])
        purpose, usage = Purpose(*parameters["purpose"]), Usage(*parameters["usage"])
        await self._head.ledger.settle(
            parameters["number"], parameters["model"], purpose, usage, parameters["version"]
        )

    async def _put(self, key: str, value: Any) -> None:
        if not _is_step_of(key, self.playing):
            raise RequestError(f"a runner may only write steps of its own episodes, not {key!r}")
        await self._head.journal.put(key, value)
        await self._tell_versions()

    async def _sample(self, parameters: dict[str, Any], note: Note) -> Any:
        conversation = parameters["conversation"]
        known = self._known[conversation] if conversation in self.playing else {}
        asked = decode_request(parameters, known)
        request = asked.request
        if parameters["streams"]:
            request = replace(request, on_delta=lambda delta: note(["delta", encode_delta(delta)]))
        with counting_retries() as count, restored(Purpose(*parameters["purpose"])):
            try:
                call = await self._head.answer(replace(asked, request=request), count)
            finally:
                if count.retries:
                    note(["tried", [dict(count.causes), count.waited]])
        known[parameters["number"]] = call
        return encode_answer(call, known, parameters["earlier"])

    async def _tell_versions(self) -> None:
        """Have the engines that it has built itself adopt what the head's have adopted."""
        news = {
            name: engine.adopted
            for name, engine in ((name, bare(each)) for name, each in self._head.engines.items())
            if name not in self._head.sampled_here and isinstance(engine, Portable)
            if engine.adopted is not None and engine.adopted != self._adopted.get(name)
        }
        if news:
            self._adopted |= news
            await self._ask("adopt", {name: each.model_dump(mode="json") for name, each in news.items()})

    async def _beat(self) -> None:
        """Watch whether the event loop turns; a runner in which it stands still for too long is killed."""
        head, asked_at = self._head, time.monotonic()
        ping: asyncio.Task[Any] | None = None
        while not self._serving.done():
            await asyncio.sleep(self._beat_seconds)
            if ping is None or ping.done():
                asked_at = time.monotonic()
                ping = asyncio.ensure_future(self._greet())
            elif head.patience is not None and time.monotonic() - asked_at > head.patience:
                end = ProcessEnd(f"did not answer for {head.patience:g} s: something in it blocks")
                self._killed_for = RunnerDied(end, is_late=True)
                self.process.kill()

    async def _greet(self) -> None:
        with contextlib.suppress(Disconnected, RunnerDied):
            report = await self._link.ask("ping", {})
            self.calls = report["calls"]
            await self._tell_versions()


def _is_step_of(key: str, episodes: Collection[str]) -> bool:
    """Whether a key of the journal is that of one of these episodes, or of a step of one."""
    while key and key not in episodes:
        key = key.rpartition("/")[0]
    return bool(key)
