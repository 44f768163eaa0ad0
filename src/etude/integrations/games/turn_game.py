"""The shared parts of turn-based games: options, timed calls into an environment, players and scores."""

from __future__ import annotations

import asyncio
import importlib
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import Field

from etude.config.component import CHANGEABLE, Supplies, WorkflowConfig
from etude.config.import_path import import_object, where_raised
from etude.core.data_model import name_type, number
from etude.core.episode import Example
from etude.core.errors import EpisodeError, RequestError, alternatives, require_extra
from etude.core.message import Message
from etude.core.threads import call_in_thread
from etude.rollout.episode import Episode

EnvT = TypeVar("EnvT")
T = TypeVar("T")


class SizesConfig(WorkflowConfig):
    """The number of examples that an environment supplies, and the time limit of its calls."""

    package: ClassVar[str]
    """The import name of the library."""
    extra: ClassVar[str]

    size: int = Field(default=256, ge=1)
    """The number of training examples to generate."""
    validation_size: int = Field(default=128, ge=1)
    """The number of held-out examples to generate."""
    call_timeout: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """The time limit in seconds of each call into the environment."""

    @classmethod
    def library(cls, module: str | None = None) -> Any:
        """Import the library, or a module of it. Raises MissingExtraError if it is not installed."""
        require_extra(cls.package, f"`_type: {cls.type_name}`", cls.extra)
        return importlib.import_module(module or cls.package)

    def datasets(self, kind: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Return the two datasets for `Supplies`, from the config of a dataset component."""
        return {
            "dataset": {**kind, "size": self.size},
            "validation": {**kind, "size": self.validation_size, "split": "validation"},
        }


class GameConfig(SizesConfig):
    """Options of turn-based games."""

    prompt: str | None = None
    """Text to put before a player's first observation."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = Field(default=50, ge=1)
    """The maximum number of answers of all players together. The game stops after them."""
    history: bool = True
    """Show a player the whole game so far. If false, show only the prompt and the current observation."""

    def measures(self, seats: Mapping[str, str | None]) -> Supplies:
        """Return seeds, and evaluators for turns, invalid answers and the reward of each seat."""
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
    """Import the function or class that a config key names. Raises RequestError for other objects."""
    made: Callable[..., Any] = import_object(path)
    if not callable(made):
        raise RequestError(f"{key}: '{path}' is not a class or function")
    return made


def unknown(what: str, name: str, known: Any) -> RequestError:
    """Return the error for an unknown environment, with the nearest known name."""
    return RequestError(f"there is no {what} '{name}'" + alternatives(name, sorted(known)))


def whole_number(example: Example, name: str, what: str) -> int:
    """Return a required whole number from an example's inputs. Raises EpisodeError if it is not one.

    Text is converted, because all values of a CSV file are text.
    """
    value = example.inputs.get(name)
    try:
        return int(str(value))
    except ValueError:
        found = "it has none" if value is None else f"found {name_type(value)}"
        raise EpisodeError(
            f"example {example.id!r} cannot start a game: {what} needs a whole number as '{name}', and "
            f"{found}; give each row one, or leave out the dataset, and the workflow supplies its own"
        ) from None


class EnvironmentFailed(EpisodeError):
    """A failure of an environment: it raised, took too long, or gave an invalid observation or reward."""


async def call_with_timeout(what: str, fn: Callable[[], T], seconds: float) -> T:
    """Run `fn` in a thread. Raises EnvironmentFailed about `what` if it raises or exceeds `seconds`."""
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


class Game(Generic[EnvT]):
    """An environment of another library, made on entry and closed on exit.

    Calls run in threads, one at a time, within `around` and for at most `seconds`.
    """

    env: EnvT

    def __init__(
        self,
        name: str,
        make: Callable[[], EnvT],
        seconds: float,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._name, self._make, self._seconds, self._around = name, make, seconds, around
        self._lock = threading.Lock()

    async def __aenter__(self) -> Self:
        """Make the environment. Raises EnvironmentFailed."""
        self.env = await self._run("making it", self._make)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the environment. Raises EnvironmentFailed, unless there is an earlier error."""
        try:
            await self._run("close()", getattr(self.env, "close", lambda: None))
        except EnvironmentFailed:
            if error is None:
                raise

    async def call(self, what: str, fn: Callable[[EnvT], T]) -> T:
        """Call `fn` with the environment. `what` names the call in errors. Raises EnvironmentFailed."""
        return await self._run(what, lambda: fn(self.env))

    async def _run(self, what: str, fn: Callable[[], T]) -> T:
        def locked() -> T:
            with self._lock, self._around():
                return fn()

        return await call_with_timeout(f"{self._name}: {what}", locked, self._seconds)


_global_random = threading.Lock()


class IsolatedRandom:
    """A separate random stream for code that draws from Python's global random generator.

    Only one such call at a time runs in the whole process.
    """

    def __init__(self, seed: int | None) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Swap this object's state into the global generator for the duration."""
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
    """One seat of a game: its conversation, and the model that answers for it."""

    name: str
    model: str | None = None
    prompt: str | None = None
    history: bool = True
    messages: list[Message] = field(default_factory=list)

    async def answer(self, episode: Episode, observation: str) -> str:
        """Return the model's answer to an observation. The call is recorded under the seat's name."""
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
class GameResult:
    """The results of a game so far: turns, invalid answers, and the rewards of each seat."""

    game: str
    turns: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, float] = field(default_factory=dict)

    def earn(self, seat: str, given: Any) -> float:
        """Add a reward to a seat, and return it. Raises EnvironmentFailed unless it is a finite number."""
        try:
            reward = number(given)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise EnvironmentFailed(f"{self.game}: the reward {given!r:.80} is not a finite number")
        self.rewards[seat] = self.rewards.get(seat, 0.0) + reward
        return reward

    def record(self, episode: Episode) -> dict[str, Any]:
        """Record the scores of the episode, or of each of several seats, and return the episode's output."""
        episode.score("turns", self.turns)
        episode.score("invalid", self.invalid.total())
        for seat, reward in self.rewards.items():
            episode.score("reward", reward, agent=seat if len(self.rewards) > 1 else None)
        return {"rewards": self.rewards, "turns": self.turns, "invalid": dict(self.invalid)}
