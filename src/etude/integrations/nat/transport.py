"""The transport that records an agent's requests in its episode, and the store for the agent's steps.

The agent is built once, and one HTTP client serves all of its episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from etude.core.errors import EpisodeError
from etude.rollout.episode import Episode
from etude.store.journal import Journal
from etude.wire.gateway import FUNCTION_HEADER, RecordingTransport, as_httpx, error_response

Running = Callable[[], tuple[Episode | None, str]]
"""A function that returns the running episode, None outside of one, and the agent's running function."""


class EpisodeTransport(httpx.AsyncBaseTransport, httpx.BaseTransport):
    """An HTTP transport that passes each request to the running episode. It opens no socket.

    It serves asyncio clients, and blocking clients in threads that an episode has started.
    """

    def __init__(self, model: str, running: Running) -> None:
        """Create the transport. `model` is the entry of `llms` that answers."""
        self._model = model
        self._running = running

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the recorded answer, or an error response outside of an episode."""
        return await self._transport(request).handle_async_request(request)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer as `handle_async_request` does. Raises EpisodeError on the event loop."""
        return self._transport(request).handle_request(request)

    def _transport(self, request: httpx.Request) -> RecordingTransport | httpx.MockTransport:
        """Return the running episode's transport, or one that refuses outside of an episode."""
        episode, request.headers[FUNCTION_HEADER] = self._running()
        if episode is None:
            error = EpisodeError(
                f"the model '{self._model}' is being trained, and was called outside of an episode; give "
                "evaluators, and all code outside the agent, a separate entry of `llms`"
            )
            refusal = error_response(request.url.path, error)
            return httpx.MockTransport(lambda request: as_httpx(refusal))
        return RecordingTransport(
            lambda body: episode.answer(body, self._model), episode.answers_given, episode.loop.wait
        )


async def keep_steps(journal: Journal, episode_id: str, steps: Sequence[dict[str, Any]]) -> None:
    """Journal the dumped steps of an episode, for evaluators that score it after a crash.

    Values that JSON lacks become text. Raises StoreError.
    """
    data = from_json(to_json(steps, fallback=str, inf_nan_mode="null"))
    await journal.put(f"{episode_id}/nat", {"steps": data})


def read_steps(journal: Journal, episode_id: str) -> list[dict[str, Any]]:
    """Return the steps of an episode; an empty list if none were stored."""
    return list(journal.get(f"{episode_id}/nat", {"steps": []})["steps"])
