"""The episode as a workflow without asyncio sees it: the same, with calls that wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import random
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from etude.core.errors import EpisodeError
from etude.core.example import Example
from etude.rollout.episode import Episode

if TYPE_CHECKING:
    from openai import OpenAI

    from etude.wire.endpoint import Endpoint

P = ParamSpec("P")
T = TypeVar("T")


def _waiting_for(
    method: Callable[Concatenate[Episode, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncEpisode, P], T]:
    """The method of an episode, with a result that is waited for."""

    @functools.wraps(method)
    def call(episode: SyncEpisode, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return episode.wait(method(episode._episode, *args, **kwargs))

    return call


class SyncEpisode:
    """One run of a workflow that is a plain function: an `Episode` whose calls wait for their answers."""

    def __init__(self, episode: Episode) -> None:
        self.id = episode.id
        self.example: Example = episode.example
        self.generation = episode.generation
        self.random: random.Random = episode.random
        self.function = episode.function
        self.step_reward = episode.step_reward
        self.note = episode.note
        self._episode = episode
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._over = False
        self._thread = threading.get_ident()  # The event loop's, which must never wait.

    chat = _waiting_for(Episode.chat)
    """Ask a model to continue the conversation, and wait for its answer."""

    def openai(self, model: str | None = None) -> OpenAI:
        """A real `OpenAI` client whose chat completions are recorded into this episode."""
        from etude.wire.recording import blocking_recording_client

        episode = self._episode
        episode.require_model(model)
        return blocking_recording_client(lambda body: episode.answer(body, model), self.wait, episode.said)

    @property
    def endpoint(self) -> Endpoint:
        """Base URL and key under which code in another process reaches the recorded models."""

        async def open_endpoint() -> Endpoint:
            return self._episode.endpoint

        return self.wait(open_endpoint())

    def close(self) -> None:
        """Let go of the calls that a thread still waits for: they raise EpisodeError there."""
        self._over = True
        for waiting in tuple(self._waiting):
            waiting.cancel()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run on the episode's event loop; for other threads only."""
        if self._over:
            work.close()
            raise self._is_over()
        if threading.get_ident() == self._thread:
            work.close()
            raise EpisodeError("a blocking call on the event loop would wait for ever; write `async def`")
        waiting = asyncio.run_coroutine_threadsafe(work, self._episode.loop)
        self._waiting.add(waiting)
        try:
            return waiting.result()
        except concurrent.futures.CancelledError as error:
            raise self._is_over() from error
        finally:
            self._waiting.discard(waiting)

    def _is_over(self) -> EpisodeError:
        return EpisodeError(f"episode {self.id} is over; it can make no more calls")
