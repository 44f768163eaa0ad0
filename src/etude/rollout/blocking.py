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
    """One run of a workflow written as a plain function. See `Episode`, whose names it has."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._over = False
        self._thread = threading.get_ident()  # The event loop's, which must never wait.

    @property
    def id(self) -> str:
        """See Episode."""
        return self._episode.id

    @property
    def example(self) -> Example:
        """See Episode."""
        return self._episode.example

    @property
    def generation(self) -> int:
        """See Episode."""
        return self._episode.generation

    @property
    def random(self) -> random.Random:
        """See Episode."""
        return self._episode.random

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
        """Ask a model to continue the conversation, and wait for its answer. See `Episode.chat`."""
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
        """A real `OpenAI` client whose chat completions are recorded. See `Episode.openai`."""
        from etude.wire.recording import blocking_recording_client

        episode = self._episode
        episode.require_model(model)
        return blocking_recording_client(lambda body: episode.answer(body, model), self.wait, episode.said)

    @property
    def endpoint(self) -> Endpoint:
        """See Episode."""

        async def open_endpoint() -> Endpoint:
            return self._episode.endpoint

        return self.wait(open_endpoint())

    def function(self, name: str) -> FunctionScope:
        """See Episode."""
        return FunctionScope(name)

    def step_reward(self, value: float, reason: str = "") -> None:
        """See Episode."""
        self._episode.step_reward(value, reason)

    def note(self, text: str) -> None:
        """See Episode."""
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
