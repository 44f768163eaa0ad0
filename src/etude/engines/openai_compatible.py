"""The engine for any endpoint with OpenAI's chat completions API."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic_core import from_json

from etude.config.builder import Builder
from etude.config.registry import register_llm
from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError, ImpossibleCall, RequestError
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion
from etude.core.keys import generator
from etude.core.secrets import keep_secret, masked
from etude.engines.openai_config import NOT_FOR_REASONING, OPENAI_URL, OpenAiLlmConfig
from etude.wire.client import (
    USUAL_FIELDS,
    TokenLogprobs,
    beginning_digest,
    charged_for,
    conversation_key,
    encode,
    parse_completion,
    read_answer,
    request_fields,
)
from etude.wire.dialect import require_asked
from etude.wire.retries import Refusal, Retryable, note_charged, with_retries

T = TypeVar("T")

_WHAT_TO_DO = {
    "http_401": "check its `api_key`, or OPENAI_API_KEY",
    "http_403": "check its `api_key`, or OPENAI_API_KEY, and what the key may do",
    "http_402": "check the account's balance",
    "http_404": "check its `model_name` and `base_url`",
    "timeout": "look at the server's load and log, or raise `request_timeout`",
    "connection": "start the server, or check `base_url`",
    "scheme": "check `base_url`",
    "too_large": "ask for fewer logprobs",
}
"""Advice about a call that failed for good, by its cause."""


class OpenAiEngine(Engine):
    """Samples from a model over HTTP. Concurrent calls are sent at once; the endpoint batches them."""

    def __init__(self, config: OpenAiLlmConfig) -> None:
        """Raises RequestError if OpenAI needs an API key and there is none."""
        from etude.engines.http_client import HttpClient

        self._config = config
        self._address = config.address
        self._client = HttpClient(_headers(config))
        self._provider = config.provider_there
        self._model = config.model_name
        self._version = 0
        self.adopted: ModelVersion | None = None
        self._closed = False
        is_reasoning = self._provider.is_reasoning_model(config.model_name)
        self._omitted = (*config.omit, *(NOT_FOR_REASONING if is_reasoning else ()))
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
            fields = request_fields(request, self._config.takes, self._provider.thinking)
        except Refusal as error:
            raise error.error(self._name_model(str(error))) from None
        if fields.keys() - USUAL_FIELDS:
            fields |= self._provider.with_more
        for name in self._omitted:
            fields.pop(name, None)
        if "max_tokens" in fields and request.prompt is None:
            fields[self._provider.max_tokens] = fields.pop("max_tokens")
        top = request.top_logprobs
        likeliest: dict[str, Any] = {}
        if top and self._config.asks_for_token_ids:
            likeliest["return_tokens_as_token_ids"] = True
        if request.prompt is None:
            likeliest |= {"logprobs": True, "top_logprobs": top} if top else {}
        elif top or "logprobs" in self._fixed_fields:  # The completions API has one field for both.
            likeliest["logprobs"] = top
        fields = self._fixed_fields | likeliest | fields | self._config.extra_body

        def read(data: bytes, version: int) -> Completion:
            completion = parse_completion(data, version, top=top)
            try:
                require_asked(completion, logprobs=bool(self._config.logprobs), top=top)
            except ImpossibleCall as error:
                raise ImpossibleCall(self._name_model(str(error)), param=error.param) from None
            return completion

        path = "chat/completions" if request.prompt is None else "completions"
        return await self._answer(path, fields, request.key, self._session(request), read)

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logprob of each token given the tokens before it; 0 for the first.

        The endpoint must accept token ids and return `prompt_logprobs`, as vLLM does. Raises EngineError.
        """
        fields = {"prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}

        def read(data: bytes, version: int) -> tuple[float, ...]:
            try:
                rows = from_json(data)["choices"][0]["prompt_logprobs"]
                tokens = [row[str(id)] for id, row in zip(ids[1:], rows[1:], strict=True)]
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise Refusal(
                    "the answer has no prompt_logprobs of the prompt's token ids; a teacher needs an "
                    "endpoint that gives them, such as vLLM"
                ) from error
            scored = read_answer(TokenLogprobs, {"content": [{"logprob": t["logprob"]} for t in tokens]})
            return (0.0, *(each["logprob"] for each in scored.content or ()))

        return await self._answer("completions", fields, len(ids), {}, read)

    async def adopt(self, version: ModelVersion) -> None:
        """Use `version.location`, the endpoint's name for the new weights, from the next attempt on."""
        self._model, self._version, self.adopted = version.location, version.number, version

    async def close(self) -> None:
        self._closed = True
        await self._client.close()

    async def _answer(
        self,
        path: str,
        fields: dict[str, Any],
        key: int,
        headers: Mapping[str, str],
        read: Callable[[bytes, int], T],
    ) -> T:
        """POST a request with retries, and return the answer as parsed by `read`.

        `read` gets the body and the version. Raises EngineError.
        """
        attempts = 0

        async def attempt() -> T:
            nonlocal attempts
            attempts += 1
            return await self._attempt(path, fields, headers, read)

        policy, spread = self._config.retry_policy, generator(key, "retry")
        try:
            return await with_retries(attempt, policy=policy, spread=spread)
        except (Retryable, Refusal) as error:
            if isinstance(error, Refusal) and error.impossible:
                raise error.error(self._name_model(str(error))) from None
            last = f" (attempt {attempts}, the last)" if isinstance(error, Retryable) else ""
            advice = f"; {_WHAT_TO_DO[error.cause]}" if error.cause in _WHAT_TO_DO else ""
            raise EngineError(self._name_model(f"{error}{last}{advice}")) from None

    async def _attempt(
        self, path: str, fields: dict[str, Any], headers: Mapping[str, str], read: Callable[[bytes, int], T]
    ) -> T:
        """Send one attempt, and return the parsed answer. Raises Retryable or Refusal."""
        if self._closed:
            raise Refusal("the engine is closed")
        version, content = self._version, encode({"model": self._model, **fields})
        url = f"{self._address}/{path}"
        data = await self._client.post(url, content, headers, self._config.request_timeout)
        try:
            return read(data, version)
        except (Retryable, Refusal, ImpossibleCall):
            note_charged(charged_for(data))
            raise

    def _session(self, request: ChatRequest) -> dict[str, str]:
        """Return the header by which a router keeps a conversation at one server: a digest of its name."""
        header = self._provider.session_header
        return {header: beginning_digest(conversation_key(request))} if header else {}

    def _name_model(self, reason: str) -> str:
        """Return the reason of an error with model and address, without secrets."""
        return f"model '{self._model}' at {self._address}: {masked(reason)}"


def _headers(config: OpenAiLlmConfig) -> dict[str, str]:
    key = config.api_key.get_secret_value() if config.api_key else os.environ.get("OPENAI_API_KEY", "")
    headers = {}
    if key := key.strip():
        keep_secret(key)
        headers["authorization"] = f"Bearer {key}"
    elif config.address == OPENAI_URL:
        raise RequestError(
            f"model '{config.model_name}' is to be sampled from OpenAI, but there is no API key. "
            "Set OPENAI_API_KEY, or `api_key`, or `base_url` for another endpoint."
        )
    own = {name: value.get_secret_value() for name, value in config.headers.items()}
    keep_secret(*own.values())
    return headers | own


@register_llm(config_type=OpenAiLlmConfig)
async def openai_llm(config: OpenAiLlmConfig, builder: Builder) -> AsyncIterator[OpenAiEngine]:
    """A model behind an OpenAI-compatible endpoint."""
    engine = OpenAiEngine(config)
    try:
        yield engine
    finally:
        await engine.close()
