"""Calls into somebody else's environment: in a thread, in time, one after the other, closed at the end."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, Generic, TypeVar

from etude.config.import_path import where_raised
from etude.core.data_model import kind_of, number
from etude.core.errors import EpisodeError
from etude.core.threads import call_in_thread

EnvT = TypeVar("EnvT")
T = TypeVar("T")


class EnvironmentFailed(EpisodeError):
    """An environment raised, took too long, or gave something that is no observation or reward."""


class Guard(Generic[EnvT]):
    """One environment, which is called in threads, never twice at the same time.

    Whatever it raises becomes an error that names it and the call, with the line in it. A call that takes
    too long is left to itself, and what comes after waits for it as long as it may take itself.
    """

    def __init__(
        self, name: str, env: EnvT, seconds: float, around: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.name = name
        self.env = env
        self._seconds = seconds
        self._around = around
        self._lock = threading.Lock()

    async def call(self, what: str, fn: Callable[[EnvT], T]) -> T:
        """The result of `fn`; `what` names the call. Raises EnvironmentFailed."""

        def locked() -> T:
            with self._lock, self._around():
                return fn(self.env)

        return await in_time(f"{self.name}: {what}", locked, self._seconds)

    def problem(self, text: str) -> EnvironmentFailed:
        """An error about what the environment gave."""
        return EnvironmentFailed(f"{self.name}: {text}")

    def reward(self, what: str, value: Any) -> float:
        """A reward as a float. Raises EnvironmentFailed for what is no finite number."""
        try:
            reward = number(value)
        except ValueError:
            raise self.problem(f"{what} gave the reward {kind_of(value)}; a reward is a number") from None
        if not abs(reward) < float("inf"):
            raise self.problem(f"{what} gave the reward {reward}; a reward is a finite number")
        return reward


@asynccontextmanager
async def guarded(
    name: str,
    make: Callable[[], EnvT],
    seconds: float,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> AsyncIterator[Guard[EnvT]]:
    """An environment for the duration, made, called and closed in threads.

    It is closed also when the episode is cancelled, and when it comes into being only after that. `around`
    is entered around each call into it.
    """
    over, made = threading.Event(), threading.Lock()

    def begin() -> EnvT:
        with around():
            env = make()
        with made:
            if over.is_set():
                _close(env)
            return env

    try:
        guard = Guard(name, await in_time(f"{name}: making it", begin, seconds), seconds, around)
    except BaseException:
        with made:
            over.set()
        raise
    try:
        yield guard
    except BaseException:
        # What went wrong first is what counts.
        with suppress(EnvironmentFailed):
            await guard.call("close()", _close)
        raise
    await guard.call("close()", _close)


def _close(env: Any) -> None:
    if callable(close := getattr(env, "close", None)):
        close()


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


_global_random = threading.Lock()


class OwnRandom:
    """Gives code that draws from Python's global generator a stream of its own, which others do not disturb.

    One call at a time in the whole process.
    """

    def __init__(self, seed: int | None) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def __call__(self) -> Any:
        """The global generator is its own for the duration."""
        with _global_random:
            before = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(before)
