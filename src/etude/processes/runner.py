"""The program of a runner: builds the agent from the run's config, and plays episodes that the head sends.

It reads one line from standard input: the head's address, the runner's number, and its key. It ends with the
connection. It asks the head to store every step, and to sample from every model at the head.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from etude.config.builder import Builder
from etude.core.call import ChatRequest, Completion, Usage
from etude.core.episode import Example
from etude.core.errors import EngineError, EtudeError, StoreError
from etude.core.interfaces import Engine, Run
from etude.core.job import ModelVersion
from etude.core.process import set_up_process
from etude.core.threads import run_loop
from etude.engines.meter import MeteredEngine, Purpose, current_purpose
from etude.processes.link import (
    CallCache,
    Disconnected,
    Notify,
    RunnerInvitation,
    RunnerLink,
    Stream,
    decode_answer,
    decode_delta,
    encode_request,
    shake_hands,
)
from etude.processes.shipping import build_collector, build_scorer, config_from_json
from etude.rollout.collector import Collector, EpisodeJob
from etude.rollout.evaluation import make_item
from etude.rollout.evaluator import Scorer
from etude.store.journal import Json, Steps
from etude.wire.retries import note_retries


@dataclass
class Agent:
    """Everything that a runner has built."""

    collector: Collector
    scorer: Scorer
    journal: RemoteJournal
    engines: Mapping[str, Engine]

    async def play(self, parameters: dict[str, Any]) -> None:
        """Run an episode and score it, unless the head's journal has the result."""
        job = EpisodeJob(
            parameters["id"],
            Example(**parameters["example"]),
            parameters["generation"],
            parameters["sampling"],
            widths=parameters["widths"],
        )
        try:
            with self.journal.episode(job.id, parameters["steps"]):
                record = await self.collector.run(job)
                if record.failure is None:
                    await self.scorer.score_single(make_item(record))
        except RecursionError:
            os._exit(1)  # An episode has lowered the limit, and nothing runs here any more.
        finally:
            for engine in self.engines.values():
                if isinstance(engine, RemoteEngine):
                    engine.forget(job.id)


@asynccontextmanager
async def _open_agent(parameters: Mapping[str, Any], link: RunnerLink) -> AsyncIterator[Agent]:
    config = config_from_json(parameters["config"])
    if (gigabytes := config.eval.general.runner_memory) is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 1e9),) * 2)
    journal = RemoteJournal(Path(parameters["run"]), link)
    remote = {name: RemoteEngine(name, link) for name in parameters["at_head"]}
    ledger = RemoteLedger(link, reserves_calls=parameters["reserves_calls"])
    meter = partial(MeteredEngine, account=ledger, llms=config.llms)
    async with Builder(config, RemoteRun(journal.path, journal), remote, meter) as builder:
        built = {name: await builder.get_llm(name) for name in config.llms if name not in remote}
        # In the order of the head, because the first one may be the default.
        engines = {name: remote.get(name) or built[name] for name in parameters["models"]}
        collector = await build_collector(builder, engines, journal)
        scorer = await build_scorer(builder, journal)
        try:
            yield Agent(collector, scorer, journal, engines)
        finally:
            await collector.close()


async def play(invitation: RunnerInvitation) -> None:
    """Serve as the runner of an invitation until the head closes the connection or is gone."""
    try:
        host, _, port = invitation.address.rpartition(":")
        stream = Stream(*await asyncio.open_connection(host, int(port)))
        key = bytes.fromhex(invitation.key)
        await shake_hands(stream, invitation.number, lambda number: key)
    except (OSError, Disconnected, TimeoutError) as error:
        raise EtudeError(f"no head at {invitation.address}: {error or type(error).__name__}") from error
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[dict[str, Any]] = loop.create_future()
    built: asyncio.Future[Agent] = loop.create_future()

    async def answer(method: str, parameters: dict[str, Any], note: Notify) -> Any:
        match method:
            case "build":
                asked.set_result(parameters)
                await asyncio.shield(built)
            case "play":
                await built.result().play(parameters)
            case "adopt":
                for name, version in parameters.items():
                    await built.result().engines[name].adopt(ModelVersion.model_validate(version))
            case "ping":
                return {"calls": built.result().collector.calls_under_way() if built.done() else {}}
            case _:
                raise EtudeError(f"a runner does not know the method {method!r}")
        return None

    link = RunnerLink(stream, answer)
    serving = asyncio.ensure_future(link.serve())
    first: set[asyncio.Future[Any]] = {serving, asked}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        try:
            # In this task, because the task that opens a component must close it.
            async with _open_agent(asked.result(), link) as agent:
                built.set_result(agent)
                await serving
        except Exception as error:
            if built.done():
                raise
            built.set_exception(error)
    await serving


def main() -> None:
    """Read the invitation, and play."""
    set_up_process()
    invitation = RunnerInvitation(*json.loads(sys.stdin.readline()))
    try:
        run_loop(play(invitation))
    except EtudeError as error:
        sys.exit(str(error))


class RemoteJournal(Steps):
    """The steps of the episodes played here. Each counts only once it is on the head's disk."""

    def __init__(self, path: Path, link: RunnerLink) -> None:
        self.path = path
        self._link = link
        self._steps: dict[str, dict[str, Json]] = {}
        """The stored steps of the episodes played here, by episode id."""

    @contextlib.contextmanager
    def episode(self, episode_id: str, steps: Mapping[str, Json]) -> Iterator[None]:
        """Hold the stored steps of an episode within the block."""
        self._steps[episode_id] = dict(steps)
        try:
            yield
        finally:
            del self._steps[episode_id]

    def get(self, key: str, default: Json = None) -> Json:
        """Return the value of a step of an episode played here, or `default`."""
        return next((steps[key] for steps in self._steps.values() if key in steps), default)

    async def put(self, key: str, value: Json) -> None:
        """Store `value` under `key`. Returns when it is on the head's disk.

        Raises like `Journal.put`, and StoreError for a step of an episode that is not played here.
        """
        episode = next((each for each in self._steps if key == each or key.startswith(f"{each}/")), None)
        if episode is None:
            raise StoreError(f"{self.path}: a runner only stores steps of its own episodes, not {key!r}")
        # Shielded: the value is still stored if this task is cancelled now.
        await asyncio.shield(asyncio.ensure_future(self._link.ask("put", {"key": key, "value": value})))
        if episode in self._steps:
            self._steps[episode][key] = value


class RemoteEngine(Engine):
    """A model that the head samples from."""

    _numbers = itertools.count()

    def __init__(self, name: str, link: RunnerLink) -> None:
        self._name = name
        self._link = link
        self._known: defaultdict[str, CallCache] = defaultdict(dict)

    @property
    def version(self) -> int:
        """0, because each answer carries its own version."""
        return 0

    async def complete(self, request: ChatRequest) -> Completion:
        """Have the head sample. Raises the errors of its engine."""
        known = self._known[request.conversation] if request.conversation else {}
        asked = encode_request(request, self._name, next(self._numbers), known)
        asked["purpose"] = astuple(current_purpose())
        tried: list[Any] = [{}, 0.0]

        def listen(note: Any) -> None:
            if note[0] == "tried":
                tried[:] = note[1]
            elif request.on_delta is not None:
                request.on_delta(decode_delta(note[1]))

        try:
            answer = await self._link.ask("sample", asked, listen)
        finally:
            # Here, in the task of the call whose attempts are counted.
            note_retries(*tried)
        return decode_answer(asked, answer, known)

    async def adopt(self, version: ModelVersion) -> None:
        """Raise EngineError: the head's engine adopts versions."""
        raise EngineError(f"llms.{self._name} is sampled by the run's own process, which adopts its versions")

    def forget(self, episode_id: str) -> None:
        """Drop the calls of an episode that is over."""
        self._known.pop(episode_id, None)

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""


class RemoteLedger:
    """A proxy for the run's ledger at the head."""

    def __init__(self, link: RunnerLink, *, reserves_calls: bool) -> None:
        self._link = link
        self.reserves_calls = reserves_calls

    async def hold(self, model: str, most: Usage) -> int:
        """Reserve like `Ledger.hold`."""
        return int(await self._link.ask("hold", {"model": model, "most": astuple(most)}))

    async def settle(self, number: int | None, model: str, purpose: Purpose, usage: Usage) -> None:
        """Count like `Ledger.settle`. Without a head, nothing is counted any more."""
        parameters = {"number": number, "model": model, "purpose": astuple(purpose)}
        with contextlib.suppress(Disconnected):
            await self._link.ask("settle", {**parameters, "usage": astuple(usage)})


@dataclass
class RemoteRun(Run):
    """The run folder as a runner's components see it."""

    path: Path
    journal: RemoteJournal

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's weights."""
        return self.path / "checkpoints"


if __name__ == "__main__":
    main()
