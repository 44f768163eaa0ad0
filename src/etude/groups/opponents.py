"""Opponents: earlier versions of a trained model that play one agent, drawn anew for each episode."""

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from etude.config import registry
from etude.config.builder import Builder
from etude.config.registry import register_llm
from etude.core.call import ChatRequest, Completion
from etude.core.errors import CapabilityError, EngineError, RequestError
from etude.core.interfaces import Engine, innermost
from etude.core.job import ModelVersion
from etude.core.keys import generator
from etude.engines.local import LocalLlmConfig, OpponentsConfig
from etude.engines.openai_compatible import OpenAiLlmConfig
from etude.store.facts import stored_at
from etude.store.journal import Journal, ModelLog

_PHASE = re.compile(r"(train|validation|warm-up)/[^/]+")

MakeEngine = Callable[[ModelVersion | None], Awaitable[Engine]]
"""A function that makes an engine for a version. None stands for the model as configured."""


@dataclass(eq=False)
class OpponentPool(Engine):
    """An engine that samples each episode from one earlier version of a model.

    The first episode of a phase (an epoch, a validation) journals the phase's pool. The draw depends on the
    run's seed and the episode's id alone, so a resumed run draws the same version.
    """

    name: str
    """The entry of `llms`."""
    config: OpponentsConfig
    journal: Journal | None
    seed: int
    make: MakeEngine
    outside: ModelVersion | None = None
    """The version that plays outside of training and validation; None is the model as configured."""

    def __post_init__(self) -> None:
        self._log: ModelLog | None = None
        self._engines: dict[int, Engine] = {}
        self._pools: dict[str, list[ModelVersion]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def follow(self, log: ModelLog) -> None:
        """Draw from the versions that `log` records."""
        self._log = log

    @property
    def version(self) -> int:
        """The number of the configured model, 0. Each answer carries the number of its version."""
        return 0

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample from the version drawn for the request's episode."""
        episode, version = request.conversation, self.outside
        if (match := _PHASE.match(episode)) is not None:
            versions = await self._pool(match[0])
            drawn = generator(self.seed, "opponents", self.name, episode)
            version = drawn.choice(versions) if versions else None
        number = 0 if version is None else version.number
        async with self._locks[f"engine {number}"]:
            if number not in self._engines:
                self._engines[number] = await self.make(version)
            engine = self._engines[number]
        return replace(await engine.complete(request), model_version=number)

    async def adopt(self, version: ModelVersion) -> None:
        """Raise EngineError, because an opponent is not trained."""
        raise EngineError(
            f"llms.{self.name} plays versions of '{self.config.of}', and cannot be trained itself"
        )

    async def close(self) -> None:
        """Close the engines of all versions."""
        engines, self._engines = self._engines, {}
        await asyncio.gather(*(engine.close() for engine in engines.values()))

    async def _pool(self, phase: str) -> list[ModelVersion]:
        async def members() -> list[Any]:
            return [version.model_dump(mode="json") for version in self.members(phase)]

        async with self._locks[phase]:
            if phase not in self._pools:
                key = f"opponents/{self.name}/{phase}"
                stored = [] if self.journal is None else await self.journal.step(key, members)
                self._pools[phase] = [ModelVersion.model_validate(version) for version in stored]
        return self._pools[phase]

    def members(self, phase: str = "train") -> list[ModelVersion]:
        """Return the versions that can be drawn in a phase that starts now, oldest first."""
        if self._log is None or (base := self._log.state.start) is None:
            return []
        if phase.startswith("validation"):
            return [base]
        versions = self._log.state.versions.items()
        trained = [entry.version for number, entry in versions if number > base.number]
        if self.config.draw == "latest" or phase.startswith("warm-up"):
            return [trained[-1] if trained else base]
        return [base, *trained[-self.config.size :]]

    async def close_unused(self, keep: Iterable[ModelVersion]) -> None:
        """Close all engines except those for `keep` and for the base version, which validations use."""
        kept = {version.number for version in (*keep, *self.members("validation"))} or {0}
        gone = [self._engines.pop(number) for number in [*self._engines] if number not in kept]
        await asyncio.gather(*(engine.close() for engine in gone))


@register_llm(config_type=OpponentsConfig)
async def opponents(config: OpponentsConfig, builder: Builder) -> AsyncIterator[OpponentPool]:
    """Build the pool of an entry. Raises RequestError for a model that is not trained, CapabilityError."""
    name = next(name for name, llm in builder.config.llms.items() if llm is config)
    block, llm = builder.config.finetuning, builder.config.llms[config.of]
    trained = [target.model for target in block.targets.values()] or [block.target_model]
    if config.of not in trained:
        named = ", ".join(filter(None, trained)) or "none"
        raise RequestError(
            f"llms.{name}: '{config.of}' is not trained, so it has no versions; trained: {named}"
        )
    if not isinstance(llm, LocalLlmConfig | OpenAiLlmConfig):
        raise CapabilityError(
            f"llms.{name}: earlier versions of a model of `_type: {llm.type_name}` cannot be sampled from; "
            "`local` and `openai` (with a server that keeps them) can"
        )
    journal = None if builder.run is None else builder.run.journal
    async with AsyncExitStack() as exits:
        current = innermost(await builder.get_llm(config.of)) if isinstance(llm, LocalLlmConfig) else None

        async def make(version: ModelVersion | None) -> Engine:
            if current is not None:
                return await asyncio.to_thread(_make_embedded, current, version, llm, builder)
            factory = registry.lookup("llms", llm.type_name).factory
            engine: Engine = await exits.enter_async_context(asynccontextmanager(factory)(llm, builder))
            if version is not None:
                await engine.adopt(version)
            return engine

        pool = OpponentPool(name, config, journal, block.seed, make)
        exits.push_async_callback(pool.close)
        yield pool


def _make_embedded(current: Any, version: ModelVersion | None, llm: Any, builder: Builder) -> Engine:
    """Build an engine for a version. Only the trained weights are copied; the others are shared."""
    from etude.engines.embedded import EmbeddedEngine

    policy = current.policy.twin()
    if version is not None:
        folder = None if builder.run is None else stored_at(builder.run.path, version)
        location = version.location if folder is None else str(folder)
        policy.adopt(version.model_copy(update={"location": location}))
    return EmbeddedEngine(
        policy, max_tokens=llm.max_tokens, deterministic=builder.config.finetuning.deterministic
    )
