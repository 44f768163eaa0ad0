"""The models of an episode as its endpoint lists them, and how those that are sampled here read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from etude.core.errors import RequestError
from etude.core.interfaces import bare
from etude.rollout.recorder import Models
from etude.wire.tokens import model_object


class EpisodeReaders:
    """The entries of `llms`."""

    def __init__(self, models: Models, default: str | None = None) -> None:
        """`default` is meant by names that are no entry's."""
        self._models = models
        self._default = default

    def models(self) -> list[dict[str, Any]]:
        """OpenAI's `model` object of each."""
        return [model_object(name, 0) for name in self._models.engines]

    @asynccontextmanager
    async def reader(self, model: str) -> AsyncIterator[Any]:
        """How a model reads. Raises RequestError for one that is sampled elsewhere."""
        name = model if model in self._models.engines else self._models.choose(self._default)
        speech = getattr(bare(self._models.engines[name]), "speech", None)
        if speech is None:
            raise RequestError(
                f"the model '{name}' is sampled by another server, which alone knows its tokens",
                param="model",
            )
        yield speech
