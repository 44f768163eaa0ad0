"""An engine: whatever samples from a model."""

from __future__ import annotations

from typing import Protocol

from etude.core.call import ChatRequest, Completion
from etude.core.job import ModelVersion


class Engine(Protocol):
    """Samples completions from one model, and adopts new versions of it.

    Engines batch concurrent requests themselves; callers just call `complete` many times at once.
    """

    @property
    def version(self) -> int:
        """Number of the model version that the next request will be sampled from."""

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample one assistant message.

        Raises EngineError when there is none to be had: retries are spent, the prompt does not fit,
        the endpoint refused. Cancelling the call frees what it held.
        """

    async def adopt(self, version: ModelVersion) -> None:
        """Sample from `version` from now on. Adopting the current version again does nothing.

        Raises EngineError when the weights cannot be loaded or their digest differs.
        """

    async def close(self) -> None:
        """Free threads, sockets and memory. Calling it twice is fine."""
