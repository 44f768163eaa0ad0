"""Opponents: a seat that earlier versions of a trained model play, drawn anew for each episode."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from etude.config import registry
from etude.config.registry import register_llm
from etude.core.call import ChatRequest, Completion
from etude.core.episode import EpisodeRecord
from etude.core.errors import CapabilityError, EngineError, RequestError
from etude.core.history import History
from etude.core.interfaces import Engine, bare
from etude.core.job import ModelVersion
from etude.core.keys import generator
from etude.groups.lineage import LineageLog
from etude.inference.local import LocalLlmConfig, OpponentsConfig
from etude.inference.openai_config import OpenAiLlmConfig
from etude.rewards.scorer import stored_score
from etude.store.journal import Journal
from etude.store.log import EpochLog
from etude.store.versions import stored_at

if TYPE_CHECKING:
    from etude.config.builder import Builder

_PHASE = re.compile(r"(train|validation|warm-up)/[^/]+")

MakeEngine = Callable[[ModelVersion | None], Awaitable[Engine]]
"""Makes an engine that samples from a version; None is the model as the config has it."""


@dataclass(frozen=True, slots=True)
class Game:
    """An episode in which the trained model met one of its earlier versions."""

    episode: str
    player: int
    """The version that was trained on, or measured."""
    opponent: int


class OpponentPool(Engine):
    """Plays a seat with earlier versions of a model, one for each episode.

    The pool of a phase (an epoch, a validation) is journalled when its first episode asks, and the draw
    follows from the run's seed and the episode's id: a resumed run draws the same.
    """

    def __init__(
        self,
        name: str,
        config: OpponentsConfig,
        journal: Journal | None,
        seed: int,
        target: str | None,
        make: MakeEngine,
    ) -> None:
        """`name` is the entry of `llms`; `target` is the name of the trained model in a run of several."""
        self.name = name
        self.config = config
        self._journal = journal
        self._seed = seed
        self._lineage = None if journal is None else LineageLog(journal, target or config.of)
        self._log = None if journal is None else EpochLog(journal, target)
        self._make = make
        self.outside: ModelVersion | None = None
        """Who plays where nothing is trained; None is the model as the config has it."""
        self._engines: dict[int, Engine] = {}
        self._pools: dict[str, tuple[list[ModelVersion], list[float]]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def version(self) -> int:
        """That of the model as the config has it: which one answers is said by each answer."""
        return 0

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample from the version that the request's episode has drawn."""
        version = await self.drawn(request.conversation)
        engine = await self._engine(version)
        completion = await engine.complete(request)
        return replace(completion, model_version=0 if version is None else version.number)

    async def adopt(self, version: ModelVersion) -> None:
        """Raises EngineError: what is drawn is not trained."""
        raise EngineError(
            f"llms.{self.name} plays versions of '{self.config.of}', and cannot be trained itself"
        )

    async def close(self) -> None:
        """Close the engines of all versions."""
        engines, self._engines = self._engines, {}
        await asyncio.gather(*(engine.close() for engine in engines.values()))

    async def drawn(self, episode: str) -> ModelVersion | None:
        """The version that plays in an episode; None is the model as the config has it."""
        match = _PHASE.match(episode)
        if match is None:
            return self.outside
        versions, weights = await self._pool(match[0])
        if not versions:
            return None
        return generator(self._seed, "opponents", self.name, episode).choices(versions, weights)[0]

    def members(self, phase: str = "train") -> list[ModelVersion]:
        """The versions that may be drawn in a phase that begins now, oldest first."""
        if self._lineage is None or (base := self._lineage.base()) is None:
            return []
        made = [entry.version for entry in self._lineage.entries() if entry.version.number > base.number]
        if phase.startswith("warm-up"):
            return [made[-1] if made else base]
        if phase.startswith("validation"):
            return [base]
        if self.config.draw == "latest":
            return [made[-1] if made else base]
        kept = [version for index, version in enumerate(made, start=1) if index % self.config.every == 0]
        newest = [version for version in made[-1:] if version not in kept]
        kept = (kept + newest)[-self.config.size :]
        return [base, *kept]

    def figures(self, games: Iterable[Game], reward: str | None, past: History) -> dict[str, Any]:
        """An epoch's games, and the ratings by all games so far, as JSON.

        `games` has `[player, opponent, games, points of the player]`; `unrated` counts those without a
        result. Ratings are Elo's; that of the version that training began with is 0.
        """
        counts, points = Counter[tuple[int, int]](), defaultdict[tuple[int, int], float](float)
        unrated = 0
        for game in games:
            evaluator = self.config.result or reward
            score = (
                None
                if evaluator is None or self._journal is None
                else stored_score(self._journal, game.episode, evaluator)
            )
            won, pair = self.config.points(score), (game.player, game.opponent)
            if won is None:
                unrated += 1
            else:
                counts[pair] += 1
                points[pair] += won
        rows = [[*pair, counts[pair], points[pair]] for pair in sorted(counts)]
        return {"games": rows, "unrated": unrated, "ratings": self._ratings(past, rows)}

    def _ratings(self, past: History, rows: Sequence[Sequence[float]] = ()) -> dict[str, float]:
        games: defaultdict[tuple[int, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        earlier = [(entry.metrics.get("opponents") or {}).get(self.name) or {} for entry in past.epochs]
        for player, opponent, count, won in [
            *(row for each in earlier for row in each.get("games", ())),
            *rows,
        ]:
            before = games[int(player), int(opponent)]
            games[int(player), int(opponent)] = (before[0] + count, before[1] + won)
        base = None if self._lineage is None else self._lineage.base()
        ratings = bradley_terry(games, 0 if base is None else base.number)
        return {str(number): round(rating, 1) for number, rating in sorted(ratings.items())}

    async def _pool(self, phase: str) -> tuple[list[ModelVersion], list[float]]:
        async with self._locks[phase]:
            if phase not in self._pools:
                assert self._journal is not None or not self.members(phase)
                stored: Any = [[], []]
                if self._journal is not None:
                    stored = await self._journal.step(
                        f"opponents/{self.name}/{phase}", lambda: self._new_pool(phase)
                    )
                versions = [ModelVersion.model_validate(version) for version in stored[0]]
                self._pools[phase] = versions, stored[1]
            return self._pools[phase]

    async def _new_pool(self, phase: str) -> Any:
        versions = self.members(phase)
        weights = [1.0] * len(versions)
        if self.config.draw == "rating" and self._log is not None and len(versions) > 1:
            ratings = self._ratings(self._log.history(""))
            newest = ratings.get(str(versions[-1].number), 0.0)
            weights = [
                win_probability(ratings.get(str(version.number), newest), newest) for version in versions
            ]
        return [[version.model_dump(mode="json") for version in versions], weights]

    async def _engine(self, version: ModelVersion | None) -> Engine:
        number = 0 if version is None else version.number
        async with self._locks[f"engine {number}"]:
            if number not in self._engines:
                self._engines[number] = await self._make(version)
            return self._engines[number]

    async def let_go(self, keep: Iterable[ModelVersion]) -> None:
        """Close the engines of versions that are not in `keep`, and of no validation."""
        base = None if self._lineage is None else self._lineage.base()
        kept = {version.number for version in keep} | {0 if base is None else base.number}
        gone = [self._engines.pop(number) for number in [*self._engines] if number not in kept]
        await asyncio.gather(*(engine.close() for engine in gone))


def games_of(episode: EpisodeRecord, model: str, opponents: str) -> list[Game]:
    """The game of an episode: none where one of the two did not answer."""
    answered = {call.model: call.completion.model_version for call in episode.calls if call.completion}
    if model not in answered or opponents not in answered:
        return []
    return [Game(episode.id, answered[model], answered[opponents])]


@register_llm(config_type=OpponentsConfig)
async def opponents(config: OpponentsConfig, builder: Builder) -> AsyncIterator[OpponentPool]:
    """The pool of an entry. Raises RequestError where the model is not trained, CapabilityError where earlier
    versions of it cannot be sampled."""
    name = next(name for name, llm in builder.config.llms.items() if llm is config)
    block, llm = builder.config.finetuning, builder.config.llms[config.of]
    targets: dict[str | None, str | None] = {target.model: each for each, target in block.targets.items()}
    targets = targets or {block.target_model: None}
    if config.of not in targets:
        trained = ", ".join(filter(None, targets)) or "none"
        raise RequestError(
            f"llms.{name}: '{config.of}' is not trained, so it has no versions; trained: {trained}"
        )
    if not isinstance(llm, LocalLlmConfig | OpenAiLlmConfig):
        raise CapabilityError(
            f"llms.{name}: earlier versions of a model of `_type: {llm.type_name}` cannot be sampled from; "
            "`local` and `openai` (with a server that keeps them) can"
        )
    journal = None if builder.run is None else builder.run.journal
    async with AsyncExitStack() as exits:
        current = bare(await builder.get_llm(config.of)) if isinstance(llm, LocalLlmConfig) else None

        async def make(version: ModelVersion | None) -> Engine:
            if current is not None:
                return await asyncio.to_thread(_embedded, current, version, llm, builder)
            factory = registry.lookup("llms", llm.type_name).factory
            engine: Engine = await exits.enter_async_context(asynccontextmanager(factory)(llm, builder))
            if version is not None:
                await engine.adopt(version)
            return engine

        pool = OpponentPool(name, config, journal, block.seed, targets[config.of], make)
        exits.push_async_callback(pool.close)
        yield pool


def _embedded(current: Any, version: ModelVersion | None, llm: Any, builder: Builder) -> Engine:
    """An engine of its own for a version: what is trained is in memory once more, the rest is shared."""
    from etude.inference.embedded import EmbeddedEngine

    policy = current.policy.twin()
    if version is not None:
        folder = None if builder.run is None else stored_at(builder.run.path, version)
        location = version.location if folder is None else str(folder)
        policy.adopt(version.model_copy(update={"location": location}))
    return EmbeddedEngine(
        policy,
        max_tokens=llm.max_tokens,
        deterministic=builder.config.finetuning.deterministic,
    )


Games: TypeAlias = Mapping[tuple[int, int], tuple[float, float]]
"""By two players: how many games they played, and the points of the first: 1 for a win, 0.5 for a draw."""

_PRIOR = 2.0
"""Games, half of them won, that each player has in addition against one of strength 1."""
_ROUNDS, _CLOSE = 10_000, 1e-10


def bradley_terry(games: Games, anchor: int | None = None) -> dict[int, float]:
    """The rating of each player who has played another; that of `anchor` is 0, if it is one of them.

    Player i beats j with the probability p_i / (p_i + p_j) (Bradley and Terry, 1952), where a draw counts as
    half a win. The strengths are found by p_i <- W_i / Σ_j n_ij / (p_i + p_j), which never lowers the
    likelihood (Hunter, 2004, equation 3). The prior's games keep the strengths of those finite who won all of
    theirs, or none. Ratings are Elo's: 400 · log10 p_i, so that 400 more mean odds of ten to one.
    """
    points: defaultdict[int, float] = defaultdict(float)
    met: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (first, second), (count, won) in games.items():
        if first == second:
            continue
        points[first] += won
        points[second] += count - won
        met[first][second] += count
        met[second][first] += count
    strength = dict.fromkeys(sorted(met), 1.0)
    for _ in range(_ROUNDS):
        after = {
            player: (points[player] + _PRIOR / 2)
            / (
                _PRIOR / (strength[player] + 1.0)
                + sum(count / (strength[player] + strength[other]) for other, count in met[player].items())
            )
            for player in strength
        }
        moved = max((abs(math.log(after[player] / strength[player])) for player in strength), default=0.0)
        strength = after
        if moved < _CLOSE:
            break
    zero = strength.get(anchor, 1.0) if anchor is not None else 1.0
    return {player: 400.0 * math.log10(value / zero) for player, value in strength.items()}


def win_probability(rating: float, other: float) -> float:
    """The probability that a player with a rating beats another, by Elo's formula."""
    return 1.0 / (1.0 + math.pow(10.0, (other - rating) / 400.0))
