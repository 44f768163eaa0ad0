"""The inference routes: the APIs of `etude.wire` over the engines in memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from etude.core.call import ChatRequest, Delta, Sampling
from etude.core.errors import RequestError
from etude.core.keys import fold
from etude.models.speech import Speech
from etude.server.engines import EnginePool
from etude.server.guard import Metrics
from etude.wire.answers import Heading, RecordedCompletion
from etude.wire.bodies import ChatCompletionBody, CompletionBody, as_message
from etude.wire.dialect import AnswerMemory, ChatBody
from etude.wire.gateway import Gateway
from etude.wire.http_server import ApiError
from etude.wire.messages import MessagesBody
from etude.wire.responses import ResponsesBody
from etude.wire.sampling import with_checked
from etude.wire.tokens import DetokenizeBody, TokenizeBody

_KEY_BITS = 63
_AT_ONCE_SECONDS = 0.02

_ROUTES: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/chat/completions": ("Answer a conversation", ChatCompletionBody),
    "/v1/completions": ("Continue a text", CompletionBody),
    "/v1/responses": ("Answer in the Responses API's words", ResponsesBody),
    "/v1/messages": ("Answer in Anthropic's words", MessagesBody),
    "/v1/messages/count_tokens": ("Count a prompt's tokens", MessagesBody),
    "/tokenize": ("Tokenise a text or a conversation", TokenizeBody),
    "/detokenize": ("The text of token ids", DetokenizeBody),
}
"""The summary of each route, and the body that it takes."""

T = TypeVar("T")


class Inference:
    """Answers requests by the engines of a pool, and says how their models read."""

    def __init__(self, pool: EnginePool, metrics: Metrics, base: str) -> None:
        """`base` is the model of requests about tokens that name none."""
        self._pool = pool
        self._metrics = metrics
        self._base = base

    async def answer(self, asked: ChatBody) -> RecordedCompletion:
        """One answer. Raises ApiError and EtudeError."""
        if not asked.model:
            raise RequestError("model: Field required", param="model")
        # Each answer has a seed of its own; that of the first is as in a request for just one.
        sampling = with_checked(Sampling(), {**asked.sampling, "seed": None})
        seed = asked.sampling.get("seed", secrets.randbits(_KEY_BITS))
        async with self._pool.using(asked.model, 1) as engine:
            heading = Heading(
                f"chatcmpl-{secrets.token_hex(12)}",
                asked.model,
                engine.speech.template.rendering.token_bytes,
                asked.tokens_as_ids,
            )

            def on_delta(delta: Delta) -> None:
                if asked.on_delta is not None:
                    asked.on_delta(heading, delta)

            completion = await engine.complete(
                ChatRequest(
                    asked.messages if asked.prompt is None else as_message(asked.prompt),
                    asked.tools,
                    sampling,
                    key=fold(seed, "choice", asked.choice) if asked.choice else seed,
                    tool_choice=asked.tool_choice,
                    parallel_tool_calls=asked.parallel_tool_calls,
                    template_options=asked.template_options,
                    prompt=asked.prompt,
                    top_logprobs=asked.top_logprobs,
                    prompt_logprobs=asked.prompt_logprobs,
                    on_delta=None if asked.on_delta is None else on_delta,
                )
            )
        # A prompt with several answers counts once.
        prompt = 0 if asked.choice else completion.usage.prompt_tokens
        self._metrics.count_tokens(prompt, completion.usage.completion_tokens)
        return heading.recorded(completion)

    def models(self) -> list[dict[str, Any]]:
        """None: the server has routes of its own for its models."""
        return []

    @asynccontextmanager
    async def reader(self, model: str) -> AsyncIterator[Speech]:
        async with self._pool.using(model or self._base, 0) as engine:
            yield engine.speech


def inference_routes(inference: Inference, tells_tokens: Callable[[str], bool]) -> APIRouter:
    """The routes; models that `tells_tokens` picks give token ids and logprobs without being asked."""
    router = APIRouter(tags=["inference"])

    def defaults(path: str) -> Callable[[str], dict[str, Any]]:
        given = {"logprobs": True, "return_tokens_as_token_ids": True}
        is_chat = path == "/v1/chat/completions"
        return lambda model: given if is_chat and tells_tokens(model) else {}

    memory = AnswerMemory(shared=True)
    for path, (summary, body) in _ROUTES.items():
        gateway = Gateway(inference.answer, memory, inference, defaults=defaults(path), finishes=False)
        schema = {"content": {"application/json": {"schema": _schema(body)}}, "required": True}
        router.add_api_route(
            path,
            _endpoint(gateway),
            methods=["POST"],
            summary=summary,
            name=path.strip("/").replace("/", "_"),
            openapi_extra={"requestBody": schema},
        )
    return router


def _endpoint(gateway: Gateway) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body = await request.body()

        async def respond() -> Response:
            method, path = request.method, request.scope["path"]
            return (await gateway.respond(method, path, request.headers, body)).as_starlette()

        return await unless_gone(request, respond)

    return answer


def _schema(body: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a body, without references: those of OpenAPI point elsewhere."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inlined(definitions[part["$ref"].rpartition("/")[2]])
        return {name: inlined(each) for name, each in part.items() if name != "discriminator"}

    schema_without_references: dict[str, Any] = inlined(schema)
    return schema_without_references


async def unless_gone(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is cancelled when the client hangs up.

    Raises ApiError then, for the log: there is nobody to answer.
    """
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    leaving: asyncio.Task[None] | None = None
    is_gone = is_over = False

    def leave(done: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not (done.cancelled() or is_over):
            is_gone = True
            this.cancel()

    def listen() -> None:
        nonlocal leaving
        leaving = loop.create_task(_gone(request))
        leaving.add_done_callback(leave)

    # Whoever is answered at once is not listened to meanwhile: that costs as much as reading the request.
    waiting = loop.call_later(_AT_ONCE_SECONDS, listen)
    try:
        return await work()
    except asyncio.CancelledError:
        if is_gone and this.uncancel() == 0:
            raise ApiError(499, "the client hung up") from None
        raise
    finally:
        is_over = True
        waiting.cancel()
        if leaving is not None:
            leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
