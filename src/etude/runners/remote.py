"""The head's journal and engines as a runner has them: every step and every sample is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from etude.budget.meter import Purpose, current_purpose
from etude.config.builder import Builder
from etude.config.component import ComponentConfig
from etude.config.registry import Kind
from etude.config.schema import Config
from etude.core.call import ChatRequest, Completion, Usage
from etude.core.errors import EngineError, ModelOut, StoreError
from etude.core.interfaces import Engine, Run
from etude.core.job import ModelVersion
from etude.runners.link import Disconnected, Known, Link, decode_answer, decode_delta, encode_request
from etude.store.journal import Json
from etude.wire.retries import note_model_out, note_retries


class RemoteJournal:
    """The steps of the episodes that are played here; each is on the head's disk before it counts."""

    def __init__(self, path: Path, link: Link) -> None:
        self.path = path
        self._link = link
        self._steps: dict[str, dict[str, Json]] = {}
        """The stored steps of the episodes that are played here, by their ids."""

    @contextlib.contextmanager
    def episode(self, episode_id: str, steps: Mapping[str, Json]) -> Iterator[None]:
        """Have the stored steps of an episode at hand within the block."""
        self._steps[episode_id] = dict(steps)
        try:
            yield
        finally:
            del self._steps[episode_id]

    def get(self, key: str, default: Json = None) -> Json:
        """The value stored under `key`, a step of an episode that is played here; else `default`."""
        return next((steps[key] for steps in self._steps.values() if key in steps), default)

    async def step(
        self,
        key: str,
        fn: Callable[[], Awaitable[Any]],
        *,
        encode: Callable[[Any], Json] | None = None,
        decode: Callable[[Json], Any] | None = None,
    ) -> Any:
        """As `Journal.step`, for keys that nobody asks for twice at a time."""
        stored = self.get(key)
        if stored is not None:
            return stored if decode is None else decode(stored)
        value = await fn()
        data = value if encode is None else encode(value)
        # Shielded: when this task is cancelled now, the value is still stored.
        await asyncio.shield(asyncio.ensure_future(self.put(key, data)))
        return json.loads(json.dumps(data)) if encode is None else value

    async def put(self, key: str, value: Json) -> None:
        """Store `value` under `key`; returns when it is on the head's disk.

        Raises as `Journal.put`, and StoreError for a step of no episode that is played here.
        """
        episode = next((each for each in self._steps if key == each or key.startswith(f"{each}/")), None)
        if episode is None:
            raise StoreError(f"{self.path}: a runner keeps steps of the episodes that it plays, not {key!r}")
        await self._link.ask("put", {"key": key, "value": value})
        if episode in self._steps:
            self._steps[episode][key] = value


class RemoteEngine(Engine):
    """A model that the head samples from."""

    _numbers = itertools.count()

    def __init__(self, name: str, link: Link) -> None:
        self._name = name
        self._link = link
        self._known: defaultdict[str, Known] = defaultdict(dict)

    @property
    def version(self) -> int:
        """Which one answers is said by each answer."""
        return 0

    async def complete(self, request: ChatRequest) -> Completion:
        """Have the head sample. Raises what its engine raises."""
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
        except ModelOut as error:
            raise note_model_out(error) from None
        finally:
            # Here, in the task of the call whose attempts are counted.
            note_retries(*tried)
        return decode_answer(asked, answer, known)

    async def adopt(self, version: ModelVersion) -> None:
        """Raises EngineError: the head's engine adopts versions."""
        raise EngineError(f"llms.{self._name} is sampled by the run's own process, which adopts its versions")

    def forget(self, episode_id: str) -> None:
        """Let go of the calls of an episode that is over."""
        self._known.pop(episode_id, None)

    async def close(self) -> None:
        """There is nothing to free."""


class RemoteLedger:
    """The run's ledger, which the head has."""

    def __init__(self, link: Link, *, bounds_calls: bool) -> None:
        self._link = link
        self.bounds_calls = bounds_calls

    async def hold(self, model: str, most: Usage) -> int:
        """As `Ledger.hold`."""
        return int(await self._link.ask("hold", {"model": model, "most": astuple(most)}))

    async def settle(
        self, number: int | None, model: str, purpose: Purpose, usage: Usage, version: int
    ) -> None:
        """As `Ledger.settle`; a head that is gone counts nothing any more."""
        parameters = {"number": number, "model": model, "purpose": astuple(purpose)}
        with contextlib.suppress(Disconnected):
            await self._link.ask("settle", {**parameters, "usage": astuple(usage), "version": version})


class RemoteRun(Run):
    """The run folder as the components of a runner know it."""

    def __init__(self, path: Path, journal: RemoteJournal) -> None:
        self.path = path
        self.journal = journal

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's weights."""
        return self.path / "checkpoints"


class RunnerBuilder(Builder):
    """Builds what the config names, but for the models that the head samples from."""

    def __init__(self, config: Config, run: Run, at_head: Mapping[str, Engine]) -> None:
        super().__init__(config, run)
        self._at_head = at_head

    async def _once(self, kind: Kind, name: str, config: ComponentConfig) -> Any:
        if kind == "llms" and name in self._at_head:
            return self._at_head[name]
        return await super()._once(kind, name, config)
