"""The engines in memory, one per requested model, and the inference routes over them."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from etude.core.call import Sampling
from etude.core.errors import EtudeError, RequestError
from etude.core.keys import fold
from etude.engines.answer import TokenEngine
from etude.models.text_codec import TextCodec
from etude.server.backend import Backend
from etude.server.guard import Metrics, cancel_on_disconnect
from etude.server.models import ModelStore, ServedModel
from etude.server.settings import ServerSettings
from etude.store.files import DamagedError
from etude.wire.chat import ChatCompletionBody, CompletionBody
from etude.wire.dialect import AnswerHeader, AnswerMemory, ChatBody, RecordedCompletion, model_object
from etude.wire.gateway import Gateway
from etude.wire.http_server import ApiError
from etude.wire.messages import MessagesBody
from etude.wire.request_body import apply_checked
from etude.wire.responses import ResponsesBody

_LOG = logging.getLogger("etude.server")

JOBS = "jobs"
"""The holder that stops the engine while jobs train."""
MAX_QUEUE = 4096
"""The limit of running and waiting sequences."""


@dataclass(slots=True, eq=False)
class _Loaded:
    model: ServedModel
    engine: TokenEngine
    users: int = 0
    used: float = 0.0


class EnginePool:
    """The engines by model name. The least recently used one makes room for another."""

    def __init__(self, settings: ServerSettings, models: ModelStore, backend: Backend) -> None:
        """Load nothing before `start`."""
        self._settings = settings
        self._models = models
        self._backend = backend
        self._loaded: dict[str, _Loaded] = {}
        self._loading = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._awaited = Counter[str]()
        """The number of requests that wait for a model, which is kept until it has answered them."""
        self._inside = 0
        """The number of admitted requests, whether or not their model is in memory yet."""
        self._changed = asyncio.Condition()
        self._state: Literal["running", "stopping", "stopped"] = "running"
        self._holds: set[str] = set()
        self.sequences = 0
        """Running and waiting sequences over all models."""

    def status(self) -> dict[str, Any]:
        """Return the object that `GET /engine/status` answers with."""
        return {
            "object": "engine.status",
            "engine": self._backend.name,
            "status": self._state,
            "away_for_jobs": JOBS in self._holds,
            "models": sorted(self._loaded),
            "sequences": self.sequences,
            **self._backend.status(),
        }

    @asynccontextmanager
    async def use_engine(self, name: str, sequences: int) -> AsyncIterator[TokenEngine]:
        """Yield a model's engine for a request of `sequences` sequences.

        Raises ApiError: 404 for an unknown model, 429 if the queue is full. Raises 503 if the engine stays
        away or the model cannot be loaded.
        """
        known = self._loaded.get(name)
        model = await asyncio.to_thread(self._models.get, name) if known is None else known.model
        if self.sequences + sequences > MAX_QUEUE:
            message = f"{self.sequences} sequences are in progress, and the server takes {MAX_QUEUE} at once"
            raise ApiError(429, message, code="queue_full", retry_after=1)
        self.sequences += sequences
        try:
            async with self._admit_request(model) as loaded:
                yield loaded.engine
        finally:
            self.sequences -= sequences

    def models(self) -> list[dict[str, Any]]:
        """Return OpenAI's `model` object of the base model, and of each model that a job made."""
        return [model_object(model.name, model.created) for model in self._models.all()]

    @asynccontextmanager
    async def reader(self, model: str) -> AsyncIterator[TextCodec]:
        """Yield a model's tokenizer and template."""
        async with self.use_engine(model or self._models.base.name, 0) as engine:
            yield engine.codec

    async def start(self, holder: str = "") -> None:
        """Resume serving once every holder has released the engine. Load the base model if none is loaded."""
        self._holds.discard(holder)
        if self._holds:
            return
        async with self._changed:
            if self._state == "stopping":
                await self._changed.wait_for(lambda: self._state == "stopped")
            self._state = "running"
            self._changed.notify_all()
        if not self._loaded:
            await asyncio.shield(self._loading_task(self._models.base))

    async def stop(self, holder: str = "") -> None:
        """Let running requests finish, then free the memory. New requests wait until `start`."""
        self._holds.add(holder)
        async with self._changed:
            if self._state != "running":
                await self._changed.wait_for(lambda: self._state != "stopping")
                return
            self._state = "stopping"
            await self._changed.wait_for(lambda: not self._inside)
        # Not under the condition: a running load may be waiting for it.
        async with self._loading:
            await self.close()
        async with self._changed:
            self._state = "stopped"
            self._changed.notify_all()

    async def forget(self, name: str) -> None:
        """Drop a deleted model from memory. Requests that run on it are cut off."""
        async with self._loading:
            if name in self._loaded:
                await self._unload(name)

    async def close(self) -> None:
        """Free everything."""
        for name in list(self._loaded):
            await self._unload(name)
        await self._backend.free_device()

    @asynccontextmanager
    async def _admit_request(self, model: ServedModel) -> AsyncIterator[_Loaded]:
        """Wait for the engine, and keep it loaded until the block ends."""
        await self._wait_until(lambda: self._state == "running")
        self._inside += 1
        try:
            self._awaited[model.name] += 1
            try:
                while (loaded := self._loaded.get(model.name)) is None:
                    await asyncio.shield(self._loading_task(model))
            finally:
                self._awaited[model.name] -= 1
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

    async def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises ApiError 503 after `engine_wait` seconds."""
        if holds():
            return
        try:
            async with asyncio.timeout(self._settings.engine_wait), self._changed:
                await self._changed.wait_for(holds)
        except TimeoutError as error:
            raise self._unavailable_error() from error

    def _unavailable_error(self) -> ApiError:
        message = "the engine is away, or busy loading or answering for other models; try again later"
        wait = max(5.0, self._settings.engine_wait)
        return ApiError(503, message, code="engine_unavailable", retry_after=wait)

    def _loading_task(self, model: ServedModel) -> asyncio.Task[None]:
        """Return the task that loads a model. It continues if its requests give up, for the next one."""
        loading = self._loads.get(model.name)
        if loading is None or loading.done():
            loading = self._loads[model.name] = asyncio.create_task(self._load(model))
        return loading

    async def _load(self, model: ServedModel) -> None:
        async with self._loading:
            if self._state != "running":
                raise self._unavailable_error()
            while in_the_way := self._blocking_models(model):
                idle = [*filter(self._is_idle, in_the_way)]
                if idle:
                    await self._unload(min(idle, key=lambda loaded: loaded.used).model.name)
                else:
                    await self._wait_until(lambda: any(map(self._is_idle, self._blocking_models(model))))
            try:
                engine = await self._backend.load(model)
            except DamagedError as error:
                _LOG.error("model %s cannot be loaded: %s", model.name, error)
                message = f"the model {model.name} is damaged and not served: {error.clause}; train it again"
                raise ApiError(503, message, code="model_damaged") from error
            except (EtudeError, RuntimeError) as error:
                _LOG.error("model %s cannot be loaded: %s", model.name, error)
                message = f"the model {model.name} cannot be loaded; the server's log has the reason"
                raise ApiError(503, message, code="model_unavailable", retry_after=60) from error
            self._loaded[model.name] = _Loaded(model, engine, used=time.monotonic())

    def _is_idle(self, loaded: _Loaded) -> bool:
        return not loaded.users and not self._awaited[loaded.model.name]

    def _blocking_models(self, model: ServedModel) -> list[_Loaded]:
        """Return the models that cannot share memory with `model`, or all if the pool is full."""
        group, loaded = self._backend.memory_group(model), list(self._loaded.values())
        others = [other for other in loaded if self._backend.memory_group(other.model) != group]
        return others or (loaded if len(loaded) >= self._settings.max_models else [])

    async def _unload(self, name: str) -> None:
        loaded = self._loaded.pop(name)
        await self._backend.unload(loaded.model, loaded.engine)


_ROUTES: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/chat/completions": ("Answer a conversation", ChatCompletionBody),
    "/v1/completions": ("Continue a text", CompletionBody),
    "/v1/responses": ("Answer in the format of the Responses API", ResponsesBody),
    "/v1/messages": ("Answer in the format of Anthropic's API", MessagesBody),
    "/v1/messages/count_tokens": ("Count a prompt's tokens", MessagesBody),
}
"""The summary and the body type of each route."""


def inference_routes(pool: EnginePool, metrics: Metrics) -> APIRouter:
    """Return the routes that sample."""

    async def answer(asked: ChatBody) -> RecordedCompletion:
        """Return one answer. Raises ApiError and EtudeError."""
        if not asked.model:
            raise RequestError("model: Field required", param="model")
        # Each answer has its own seed. The first one has the seed of a request for a single answer.
        sampling = apply_checked(Sampling(), {**asked.sampling, "seed": None})
        seed = asked.sampling.get("seed", secrets.randbits(63))
        async with pool.use_engine(asked.model, 1) as engine:
            heading = AnswerHeader(
                f"chatcmpl-{secrets.token_hex(12)}",
                asked.model,
                engine.codec.grammars.token_bytes,
                asked.tokens_as_ids,
            )
            key = fold(seed, "choice", asked.choice) if asked.choice else seed
            on_delta = None if asked.on_delta is None else partial(asked.on_delta, heading)
            completion = await engine.complete(asked.as_request(sampling, key=key, on_delta=on_delta))
        # A prompt with several answers counts once.
        prompt = 0 if asked.choice else completion.usage.prompt_tokens
        metrics.count_tokens(prompt, completion.usage.completion_tokens)
        return heading.with_completion(completion)

    router = APIRouter(tags=["inference"])
    memory = AnswerMemory(shared=True)
    for path, (summary, body) in _ROUTES.items():
        gateway = Gateway(answer, memory, pool, finishes=False)
        # The schema's definitions stay where they are, so references must name the whole way to them.
        place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema/$defs"
        schema = body.model_json_schema(ref_template=f"{place}/{{model}}")
        content = {"application/json": {"schema": schema}}
        router.add_api_route(
            path,
            _endpoint(gateway),
            methods=["POST"],
            summary=summary,
            openapi_extra={"requestBody": {"content": content, "required": True}},
        )
    return router


def _endpoint(gateway: Gateway) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body, path = await request.body(), request.scope["path"]
        work = gateway.respond(request.method, path, request.headers, body)
        return await cancel_on_disconnect(request, work)

    return answer
