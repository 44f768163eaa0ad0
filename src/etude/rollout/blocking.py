"""The episode as a workflow without asyncio sees it: the same, with calls that wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from etude.core.errors import EpisodeError
from etude.core.example import Example
from etude.core.message import Tool
from etude.rollout.episode import Episode
from etude.rollout.function import FunctionScope
from etude.rollout.reply import Reply

if TYPE_CHECKING:
    from openai import OpenAI

    from etude.wire.endpoint import Endpoint

T = TypeVar("T")


class SyncEpisode:
    """One run of a workflow that is a plain function: an `Episode` whose calls wait for their answers."""

    def __init__(self, episode: Episode) -> None:
        self.id = episode.id
        self.example: Example = episode.example
        self.generation = episode.generation
        self.random: random.Random = episode.random
        self._episode = episode
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._over = False
        self._thread = threading.get_ident()  # The event loop's, which must never wait.

    def chat(
        self,
        messages: Sequence[Any],
        *,
        model: str | None = None,
        tools: Sequence[Tool | Callable[..., Any]] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Reply:
        """Ask a model to continue the conversation, as `Episode.chat` does, and wait for its answer."""
        return self.wait(
            self._episode.chat(
                messages,
                model=model,
                tools=tools,
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                stop=stop,
                seed=seed,
            )
        )

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

    def function(self, name: str) -> FunctionScope:
        """Calls made inside belong to the function: `with episode.function("search"):`."""
        return FunctionScope(name)

    def step_reward(self, value: float, reason: str = "") -> None:
        """Give a reward for what was done since the call before. Raises ValueError when it is not finite."""
        self._episode.step_reward(value, reason)

    def note(self, text: str) -> None:
        """Write something into the episode's record, for whoever reads it later."""
        self._episode.note(text)

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
