"""The engine for any endpoint that speaks OpenAI's chat completions, near or far."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import stamina
from pydantic_core import from_json

from etude.config.registry import register_llm
from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError, ImpossibleCall, RequestError
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion
from etude.core.keys import generator
from etude.inference.engine import note_retry
from etude.inference.http_lanes import HttpLanes
from etude.inference.openai_config import NOT_FOR_REASONING, OPENAI_URL, OpenAiLlmConfig
from etude.wire.asking import USUAL_FIELDS, request_fields
from etude.wire.client import (
    Disturbed,
    Refused,
    encode,
    failure_of,
    parse_completion,
)
from etude.wire.logprobs import require_asked, require_possible

if TYPE_CHECKING:
    from etude.config.builder import Builder

_SILENT = logging.NullHandler()

T = TypeVar("T")


class OpenAiEngine(Engine):
    """Samples from a model behind HTTP. Concurrent calls are sent at once; the endpoint batches them."""

    def __init__(self, config: OpenAiLlmConfig) -> None:
        self._config = config
        self._base_url = config.address
        self._provider = config.provider_there
        self._secrets = [value.get_secret_value() for value in config.headers.values()]
        self._lanes = HttpLanes(self._headers())
        self._model = config.model_name
        self._version = 0
        self.adopted: ModelVersion | None = None
        self._closed = False
        # Each retry would be a line; what came of them all is on the call.
        logging.getLogger("stamina").propagate = False
        logging.getLogger("stamina").addHandler(_SILENT)
        thinks = self._provider.thinks(config.model_name)
        self._omitted = (*config.omit, *(NOT_FOR_REASONING if thinks else ()))
        self._more = config.takes
        self._fixed_fields: dict[str, Any] = {}
        if config.asks_for_logprobs:
            self._fixed_fields |= {"logprobs": True, **self._provider.with_logprobs}
        if config.asks_for_token_ids:
            self._fixed_fields |= {"return_token_ids": True, **self._provider.with_token_ids}

    @property
    def version(self) -> int:
        return self._version

    async def complete(self, request: ChatRequest) -> Completion:
        try:
            fields = request_fields(request, self._more, self._provider.thinking)
        except Refused as error:
            raise error.error(self._told(str(error))) from None
        if fields.keys() - USUAL_FIELDS:
            fields |= self._provider.with_more
        for name in self._omitted:
            fields.pop(name, None)
        if "max_tokens" in fields and request.prompt is None:
            fields[self._provider.max_tokens] = fields.pop("max_tokens")
        top = max(request.top_logprobs, self._config.top_logprobs or 0)
        fields = self._fixed_fields | self._logprob_fields(request, top) | fields | self._config.extra_body

        def read(data: bytes, version: int) -> Completion:
            prompt_top, vocabulary = request.prompt_logprobs or 0, self._config.vocabulary
            completion = parse_completion(data, version, vocabulary, top=top, prompt_top=prompt_top)
            self._require_asked(completion, request, top)
            return completion

        path = "chat/completions" if request.prompt is None else "completions"
        return await self._answer(path, fields, request.key, read)

    def _require_asked(self, completion: Completion, request: ChatRequest, top: int) -> None:
        """Raise ImpossibleCall where config or request asked for what the answer does not have."""
        config, prompt = self._config, request.prompt_logprobs is not None
        logprobs = bool(config.logprobs)
        try:
            require_asked(completion, logprobs=logprobs, top=top, prompt=prompt)
        except ImpossibleCall as error:
            raise ImpossibleCall(self._told(str(error)), param=error.param) from None

    def _logprob_fields(self, request: ChatRequest, top: int) -> dict[str, Any]:
        """How the likeliest tokens are asked for, which is what tells the two APIs apart."""
        named = {"return_tokens_as_token_ids": True} if top and self._config.asks_for_token_ids else {}
        if request.prompt is not None:
            return named | ({"logprobs": top} if top or "logprobs" in self._fixed_fields else {})
        return named | ({"logprobs": True, "top_logprobs": top} if top else {})

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        """The logprob of each token given those before it; 0 for the first.

        For endpoints that take token ids and give `prompt_logprobs`, as vLLM does. Raises EngineError.
        """
        fields = {"prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}

        def read(data: bytes, version: int) -> tuple[float, ...]:
            try:
                rows = from_json(data)["choices"][0]["prompt_logprobs"]
                values = [
                    float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows[1:], strict=True)
                ]
                require_possible(values)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise Refused(
                    "the answer has no prompt_logprobs of the prompt's token ids; a teacher needs an "
                    "endpoint that gives them, such as vLLM"
                ) from error
            return (0.0, *values)

        return await self._answer("completions", fields, len(ids), read)

    async def adopt(self, version: ModelVersion) -> None:
        """Ask for `version.location`, the endpoint's name for the new weights, from the next attempt on."""
        self._model, self._version, self.adopted = version.location, version.number, version

    async def close(self) -> None:
        self._closed = True
        await self._lanes.close()

    async def _answer(
        self, path: str, fields: dict[str, Any], key: int, read: Callable[[bytes, int], T]
    ) -> T:
        """The result of `read`, given an answer and the version that gave it. Raises EngineError."""
        config = self._config

        def wait(error: Exception) -> bool | float:
            if not isinstance(error, Disturbed):
                return False
            if error.retry_after is None:
                return True
            # Calls that were turned away together should not come back together.
            spread = generator(key, "retry").uniform(0, config.retry_wait)
            return min(error.retry_after + spread, config.max_retry_wait)

        attempts = stamina.retry_context(
            on=wait,
            attempts=config.max_retries + 1,
            timeout=None,
            wait_initial=config.retry_wait,
            wait_max=config.max_retry_wait,
            wait_jitter=config.retry_wait,
        )
        try:
            async for attempt in attempts:
                if attempt.num > 1:
                    note_retry()
                with attempt:
                    return read(*await self._attempt(path, fields))
        except Refused as error:
            raise error.error(self._told(str(error))) from None
        except Disturbed as error:
            raise EngineError(self._told(f"{error} (attempt {config.max_retries + 1}, the last)")) from None
        raise AssertionError("the loop above returns or raises")

    async def _attempt(self, path: str, fields: dict[str, Any]) -> tuple[bytes, int]:
        """The body of an answer, and the version that gave it. Raises Disturbed or Refused."""
        import httpx

        if self._closed:
            raise Refused("the engine is closed")
        model, version = self._model, self._version
        content = encode({"model": model, **fields})
        seconds = self._config.request_timeout
        try:
            # httpx limits each read; an endpoint that trickles bytes could hold the call for ever.
            async with asyncio.timeout(seconds):
                response = await self._lanes.post(f"{self._base_url}/{path}", content)
        except TimeoutError:
            raise Disturbed(f"no answer within {seconds:g} s; `request_timeout` sets the limit") from None
        except httpx.LocalProtocolError as error:
            raise Refused(f"the request cannot be sent: {error}") from error
        except httpx.RequestError as error:
            raise Disturbed(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code != 200:
            raise failure_of(response.status_code, response.headers, response.content)
        return response.content, version

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        configured = self._config.api_key
        key = configured.get_secret_value() if configured else os.environ.get("OPENAI_API_KEY", "")
        key = key.strip()
        if key:
            self._secrets.append(key)
            headers["authorization"] = f"Bearer {key}"
        elif self._base_url == OPENAI_URL:
            raise RequestError(
                f"model '{self._config.model_name}' is to be sampled from OpenAI, but there is no API key. "
                "Set OPENAI_API_KEY, or `api_key`, or `base_url` for another endpoint."
            )
        return headers | {name: value.get_secret_value() for name, value in self._config.headers.items()}

    def _told(self, reason: str) -> str:
        """The reason of an error with model and address, and without secrets."""
        for secret in filter(None, self._secrets):
            reason = reason.replace(secret, "***")
        return f"model '{self._model}' at {self._base_url}: {reason}"


@register_llm(config_type=OpenAiLlmConfig)
async def openai_llm(config: OpenAiLlmConfig, builder: Builder) -> AsyncIterator[OpenAiEngine]:
    """A model behind an OpenAI-compatible endpoint."""
    engine = OpenAiEngine(config)
    try:
        yield engine
    finally:
        await engine.close()
