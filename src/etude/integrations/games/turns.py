"""Games in turns: the options that their workflows share, calls into an environment, and each seat's part."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import Field

from etude.config.component import CHANGEABLE, Supplies, WorkflowConfig
from etude.config.import_path import import_object, where_raised
from etude.core.data_model import kind_of, number
from etude.core.episode import Example
from etude.core.errors import EpisodeError, MissingExtraError, RequestError, alternatives
from etude.core.message import Message
from etude.core.threads import call_in_thread
from etude.rollout.episode import Episode

EnvT = TypeVar("EnvT")
T = TypeVar("T")


class SizesConfig(WorkflowConfig):
    """How many examples an environment brings, and how long it may take."""

    package: ClassVar[str]
    """The import name of the library."""
    extra: ClassVar[str]

    size: int = Field(default=256, ge=1)
    """Training examples that it brings."""
    validation_size: int = Field(default=128, ge=1)
    """Held-out examples that it brings."""
    seed: int = Field(default=0, ge=0)
    """Draws other examples."""
    call_timeout: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds that a call into the environment may take."""
    timeout: Annotated[float | None, CHANGEABLE] = Field(default=None, gt=0)
    """Seconds that an episode may take."""

    @classmethod
    def library(cls, module: str | None = None) -> Any:
        """The library, or a module of it. Raises MissingExtraError where it is not installed."""
        if importlib.util.find_spec(cls.package) is None:
            raise MissingExtraError(f"`_type: {cls.type_name}`", cls.extra)
        return importlib.import_module(module or cls.package)

    def datasets(self, kind: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The two datasets that `Supplies` takes, of a dataset component of that kind."""
        shared = {**kind, "seed": self.seed}
        return {
            "dataset": {**shared, "size": self.size},
            "validation": {**shared, "size": self.validation_size, "split": "validation"},
        }


class GameConfig(SizesConfig):
    """Options of games that are played in turns."""

    prompt: str | None = None
    """Put before the first observation that a player is shown."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = Field(default=50, ge=1)
    """Answers of all players after which the game is stopped."""
    history: bool = True
    """Whether a player is shown the whole game so far, or only the prompt and what is to be seen now."""

    def measures(self, seats: Mapping[str, str | None]) -> Supplies:
        """Seeds, and what a game measures: the reward (of several seats, of each), turns, invalid answers."""
        common = {name: {"_type": "measured", "name": name} for name in ("turns", "invalid")}
        datasets = self.datasets({"_type": "seeds"})
        if len(seats) < 2:
            reward = {"reward": {"_type": "measured", "name": "reward"}}
            return Supplies(**datasets, evaluators=reward | common, reward="reward")
        rewards = {seat: f"reward_{seat}" for seat in seats}
        by_model: dict[str, str] = {}
        for seat, model in seats.items():
            if model is not None:
                by_model.setdefault(model, rewards[seat])
        own = {name: {"_type": "measured", "agent": seat} for seat, name in rewards.items()}
        return Supplies(
            **datasets, evaluators=own | common, reward=next(iter(rewards.values())), reward_of_model=by_model
        )


def named_function(path: str, key: str) -> Callable[..., Any]:
    """The function or class that a key of the config names. Raises RequestError for what is none."""
    made: Callable[..., Any] = import_object(path)
    if not callable(made):
        raise RequestError(f"{key}: '{path}' is no class or function")
    return made


def unknown(what: str, name: str, known: Any) -> RequestError:
    """The error about an environment that a library does not have, with the nearest name."""
    return RequestError(f"there is no {what} '{name}'" + alternatives(name, sorted(known)))


def whole_number(example: Example, name: str, what: str) -> int:
    """An input of an example that a game cannot do without. Raises EpisodeError where it is none.

    Text counts as the number that it spells: all that a CSV file holds is text.
    """
    value = example.inputs.get(name)
    try:
        return int(str(value))
    except ValueError:
        found = "it has none" if value is None else f"found {kind_of(value)}"
        raise EpisodeError(
            f"example {example.id!r} is no game: {what} needs a whole number as '{name}', and {found}; give "
            "each row one, or leave the dataset out, and the workflow brings its own"
        ) from None


class EnvironmentFailed(EpisodeError):
    """An environment raised, took too long, or gave something that is no observation or reward."""


async def in_time(what: str, fn: Callable[[], T], seconds: float) -> T:
    """The result of `fn`, run in a thread. Raises EnvironmentFailed, naming `what`, also after `seconds`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call_in_thread(fn)
    except EpisodeError:
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            reason = f"{what} took longer than {seconds:g} s; `call_timeout` of the workflow is the limit"
            raise EnvironmentFailed(reason) from None
        raise EnvironmentFailed(f"{what} failed: {where_raised(error)}") from error


class Guest(Generic[EnvT]):
    """Somebody else's environment, which is called in threads, never twice at the same time."""

    def __init__(
        self, name: str, env: EnvT, seconds: float, around: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.name = name
        self.env = env
        self._seconds, self._around = seconds, around
        self._lock = threading.Lock()

    async def call(self, what: str, fn: Callable[[EnvT], T]) -> T:
        """The result of `fn`; `what` names the call. Raises EnvironmentFailed."""

        def locked() -> T:
            with self._lock, self._around():
                return fn(self.env)

        return await in_time(f"{self.name}: {what}", locked, self._seconds)


@asynccontextmanager
async def opened(
    name: str,
    make: Callable[[], EnvT],
    seconds: float,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> AsyncIterator[Guest[EnvT]]:
    """An environment for the duration, which is closed whatever happens; `around` each call into it."""

    def begin() -> EnvT:
        with around():
            return make()

    def close(env: Any) -> None:
        if callable(method := getattr(env, "close", None)):
            method()

    guest = Guest(name, await in_time(f"{name}: making it", begin, seconds), seconds, around)
    try:
        yield guest
    except BaseException:
        # What went wrong first is what counts.
        with suppress(EnvironmentFailed):
            await guest.call("close()", close)
        raise
    await guest.call("close()", close)


_global_random = threading.Lock()


class OwnRandom:
    """Gives code that draws from Python's global generator a stream of its own, which others do not disturb.

    One call at a time in the whole process.
    """

    def __init__(self, seed: int | None) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The global generator is its own for the duration."""
        with _global_random:
            before = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(before)


@dataclass
class Player:
    """One seat at a game: what it was shown, what it said, and the model that speaks for it."""

    name: str
    model: str | None = None
    prompt: str | None = None
    history: bool = True
    messages: list[Message] = field(default_factory=list)

    async def answer(self, episode: Episode, observation: str) -> str:
        """The model's answer to an observation. Its calls are those of the function with the seat's name."""
        if not self.history:
            self.messages.clear()
        if not self.messages and self.prompt:
            observation = f"{self.prompt}\n\n{observation}"
        self.messages.append({"role": "user", "content": observation})
        with episode.function(self.name):
            reply = await episode.chat(self.messages, model=self.model)
        self.messages.append(reply.message)
        return reply.text


@dataclass
class Course:
    """How a game went: turns, invalid answers, and what each seat has earned so far."""

    game: str
    turns: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, float] = field(default_factory=dict)

    def earn(self, seat: str, given: Any) -> float:
        """Add to what a seat has earned. Raises EnvironmentFailed for what is no finite number."""
        try:
            reward = number(given)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise EnvironmentFailed(f"{self.game}: the reward {given!r:.80} is no finite number")
        self.rewards[seat] = self.rewards.get(seat, 0.0) + reward
        return reward

    def record(self, episode: Episode, penalty: float = 0.0) -> dict[str, Any]:
        """Record the scores of the episode, and of each seat where there are several; the episode's output.

        `penalty` is taken from the reward for each invalid answer.
        """
        episode.score("turns", self.turns)
        episode.score("invalid", self.invalid.total())
        rewards = {seat: reward - penalty * self.invalid[seat] for seat, reward in self.rewards.items()}
        for seat, reward in rewards.items():
            episode.score("reward", reward, agent=seat if len(rewards) > 1 else None)
        return {"rewards": rewards, "turns": self.turns, "invalid": dict(self.invalid)}
