"""Where models are put into memory: in this process, or in one that it runs."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, Protocol

from etude.inference.embedded import EmbeddedEngine
from etude.inference.engine import TokenEngine
from etude.models.policy import Policy
from etude.server.models import ServedModel
from etude.server.settings import ServerSettings
from etude.server.weights import load_policy


class Backend(Protocol):
    """Loads models for the engine pool, which decides when."""

    name: str

    async def open(self) -> None:
        """Get ready to serve. Raises EtudeError when that cannot be."""

    def place(self, model: ServedModel) -> str:
        """Only models of the same place can be in memory together."""

    async def load(self, model: ServedModel) -> TokenEngine:
        """An engine for a model. Raises EtudeError when it cannot be loaded."""

    async def unload(self, model: ServedModel, engine: TokenEngine) -> None:
        """Free what an engine holds."""

    async def put_away(self) -> None:
        """Free the device; nothing is loaded any more."""

    def status(self) -> dict[str, Any]:
        """More of what `GET /engine/status` tells."""


class EmbeddedBackend:
    """Models in this process, an engine for each."""

    name = "embedded"

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._first: Policy | None = None

    async def open(self) -> None:
        """Load the base model: one that cannot be is an error of the command."""
        settings = self._settings
        self._first = await asyncio.to_thread(
            Policy.load, settings.model, device=settings.device, dtype=settings.dtype
        )

    def place(self, model: ServedModel) -> str:
        """All go together."""
        return ""

    async def load(self, model: ServedModel) -> TokenEngine:
        """Load the base model, with the trained tensors of `model` on it."""
        settings, policy = self._settings, self._first
        self._first = None
        if policy is None or model.folder is not None:
            policy = await asyncio.to_thread(
                load_policy, settings.model, model, device=settings.device, dtype=settings.dtype
            )
        return EmbeddedEngine(policy, max_batch=settings.max_batch, max_tokens=settings.max_tokens)

    async def unload(self, model: ServedModel, engine: TokenEngine) -> None:
        """Drop the weights."""
        await engine.close()
        await asyncio.to_thread(_free_memory)

    async def put_away(self) -> None:
        """There is nothing but engines."""

    def status(self) -> dict[str, Any]:
        """Nothing more."""
        return {}


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # pragma: gpu
