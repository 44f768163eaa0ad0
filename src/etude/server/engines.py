"""The engines in memory: one for each model that is asked for, loaded and put away as needed."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from etude.core.errors import EtudeError
from etude.inference.embedded import EmbeddedEngine
from etude.models.policy import Policy
from etude.server.errors import ApiError
from etude.server.models import ModelStore, ServedModel
from etude.server.settings import ServerSettings
from etude.server.weights import load_policy

_LOG = logging.getLogger("etude.server")

State: TypeAlias = Literal["running", "stopping", "stopped"]


@dataclass(slots=True, eq=False)
class _Loaded:
    model: ServedModel
    engine: EmbeddedEngine
    users: int = 0
    used: float = 0.0


class EnginePool:
    """Engines by model name. The least recently used one makes room for another."""

    def __init__(self, settings: ServerSettings, models: ModelStore, base: Policy) -> None:
        """`base` is the model that the server was started with, in memory already."""
        self._settings = settings
        self._models = models
        self._loaded = {models.base.name: self._ready(models.base, base)}
        self._loading = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[_Loaded]] = {}
        self._inside = 0
        """Requests that have been let in, whether their model is in memory yet or not."""
        self._changed = asyncio.Condition()
        self._state: State = "running"
        self._holds: set[str] = set()
        self.sequences = 0
        """Under way and waiting, over all models."""

    @property
    def state(self) -> State:
        """Whether requests are served, or wait."""
        return self._state

    def status(self) -> dict[str, Any]:
        """What `GET /engine/status` tells."""
        return {
            "object": "engine.status",
            "engine": "embedded",
            "status": self._state,
            "models": sorted(self._loaded),
            "sequences": self.sequences,
        }

    @asynccontextmanager
    async def using(self, name: str, sequences: int) -> AsyncIterator[EmbeddedEngine]:
        """The engine of a model, for a request of so many sequences.

        Raises ApiError: 404 for an unknown model, 429 when the queue is full, 503 when the engine stays
        away or the model cannot be loaded.
        """
        known = self._loaded.get(name)
        model = await asyncio.to_thread(self._models.get, name) if known is None else known.model
        limit = self._settings.max_queue
        if self.sequences + sequences > limit:
            raise ApiError(
                429,
                f"{self.sequences} sequences are under way, and the server takes {limit} at once",
                code="queue_full",
                retry_after=1,
            )
        self.sequences += sequences
        try:
            async with self._let_in(model) as loaded:
                yield loaded.engine
        finally:
            self.sequences -= sequences

    async def start(self, holder: str = "") -> None:
        """Serve again, once all who put the engine away have said so; load the base model if none is."""
        self._holds.discard(holder)
        if self._holds:
            return
        async with self._changed:
            if self._state == "stopping":
                await self._changed.wait_for(lambda: self._state == "stopped")
            self._state = "running"
            self._changed.notify_all()
        if not self._loaded:
            await self._get(self._models.base)

    async def stop(self, holder: str = "") -> None:
        """Let requests under way finish, then free the memory. Requests wait until `start`."""
        self._holds.add(holder)
        async with self._changed:
            if self._state != "running":
                await self._changed.wait_for(lambda: self._state != "stopping")
                return
            self._state = "stopping"
            await self._changed.wait_for(lambda: not self._inside)
        # Without the condition, which a load that is under way may wait for.
        async with self._loading:
            for name in list(self._loaded):
                await self._unload(name)
        async with self._changed:
            self._state = "stopped"
            self._changed.notify_all()

    async def forget(self, name: str) -> None:
        """Drop a deleted model from memory; requests that run on it are cut."""
        async with self._loading:
            if name in self._loaded:
                await self._unload(name)

    async def close(self) -> None:
        """Free everything."""
        for name in list(self._loaded):
            await self._unload(name)

    @asynccontextmanager
    async def _let_in(self, model: ServedModel) -> AsyncIterator[_Loaded]:
        """Wait for the engine, and keep it until the block ends."""
        try:
            async with asyncio.timeout(self._settings.engine_wait), self._changed:
                await self._changed.wait_for(lambda: self._state == "running")
                self._inside += 1
        except TimeoutError as error:
            raise self._away() from error
        try:
            try:
                async with asyncio.timeout(self._settings.engine_wait):
                    loaded = await self._get(model)
                    while self._loaded.get(model.name) is not loaded:
                        # It had to make room again before anybody could use it.
                        loaded = await self._get(model)
            except TimeoutError as error:
                raise self._away() from error
            loaded.users += 1
            try:
                yield loaded
            finally:
                loaded.users -= 1
                loaded.used = time.monotonic()
        finally:
            self._inside -= 1
            async with self._changed:
                self._changed.notify_all()

    def _away(self) -> ApiError:
        return ApiError(
            503,
            "the engine is away, or busy with loading or with other models; try again later",
            code="engine_unavailable",
            retry_after=max(5.0, self._settings.engine_wait),
        )

    async def _get(self, model: ServedModel) -> _Loaded:
        """The model in memory. Loading goes on when nobody has the patience: the next one will want it."""
        name = model.name
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._loads:
            self._loads[name] = asyncio.create_task(self._load(model))
            self._loads[name].add_done_callback(lambda done: self._loads.pop(name, None))
        return await asyncio.shield(self._loads[name])

    async def _load(self, model: ServedModel) -> _Loaded:
        settings = self._settings
        async with self._loading:
            if self._state != "running":
                raise self._away()
            await self._make_room()
            try:
                policy = await asyncio.to_thread(
                    load_policy, settings.model, model, device=settings.device, dtype=settings.dtype
                )
            except (EtudeError, RuntimeError) as error:
                _LOG.error("model %s cannot be loaded: %s", model.name, error)
                told = f"the model {model.name} cannot be loaded; the server's log has the reason"
                raise ApiError(503, told, code="model_unavailable", retry_after=60) from error
            self._loaded[model.name] = loaded = self._ready(model, policy)
            return loaded

    def _ready(self, model: ServedModel, policy: Policy) -> _Loaded:
        settings = self._settings
        engine = EmbeddedEngine(policy, max_batch=settings.max_batch, max_tokens=settings.max_tokens)
        return _Loaded(model, engine, used=time.monotonic())

    async def _make_room(self) -> None:
        """Put the least recently used models away, and wait while all are in use."""
        while len(self._loaded) >= self._settings.max_models:
            idle = [one for one in self._loaded.values() if not one.users]
            if idle:
                await self._unload(min(idle, key=lambda one: one.used).model.name)
                continue
            async with self._changed:
                await self._changed.wait_for(lambda: any(not one.users for one in self._loaded.values()))

    async def _unload(self, name: str) -> None:
        await self._loaded.pop(name).engine.close()
        await asyncio.to_thread(_free_memory)


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # pragma: gpu


def require_room(engine: EmbeddedEngine, prompt_ids: tuple[int, ...]) -> None:
    """Raise ApiError when a prompt leaves no room for an answer, or has ids that are no tokens."""
    context, length = engine.policy.max_context, len(prompt_ids)
    if not length:
        raise ApiError(400, "the prompt is empty", code="invalid_value")
    if length >= context:
        raise ApiError(
            400,
            f"the model's context is {context} tokens, and the prompt has {length}; shorten it",
            param="messages",
            code="context_length_exceeded",
        )
    vocabulary = engine.policy.model.get_input_embeddings().num_embeddings
    if max(prompt_ids) >= vocabulary:
        raise ApiError(
            400, f"token id {max(prompt_ids)} is not in the vocabulary of {vocabulary}", param="prompt"
        )
