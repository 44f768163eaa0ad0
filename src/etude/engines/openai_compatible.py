"""The engine for any endpoint with OpenAI's chat completions API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic_core import from_json

from etude.config.builder import Builder
from etude.config.registry import register_llm
from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError, ImpossibleCall, ModelOut
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion
from etude.core.keys import generator
from etude.core.secrets import masked
from etude.engines.openai_config import NOT_FOR_REASONING, OpenAiLlmConfig
from etude.engines.routes import Address, Breaker, beginning_digest, conversation_key
from etude.wire.answers import BadAnswer, read_prompt_logprobs, require_asked
from etude.wire.client import USUAL_FIELDS, charged_for, encode, parse_completion, request_fields
from etude.wire.retries import Refusal, Retryable, RetryReason, note_charged, note_model_out, with_retries

_LONG_SECONDS = 30.0
"""Seconds after which a call that its caller cancels counts as unanswered."""

T = TypeVar("T")


class OpenAiEngine(Engine):
    """Samples from a model over HTTP. Concurrent calls are sent at once; the endpoint batches them."""

    def __init__(self, config: OpenAiLlmConfig) -> None:
        from etude.engines.http_addresses import HttpAddresses

        self._config = config
        self._addresses = HttpAddresses(config)
        self._breaker = Breaker(config.stop_after)
        self._provider = config.provider_there
        self._model = config.model_name
        self._version = 0
        self.adopted: ModelVersion | None = None
        self._closed = False
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
        except Refusal as error:
            raise error.error(self._told(str(error))) from None
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

        def read(data: bytes, version: int, model: str | None) -> Completion:
            prompt_top = request.prompt_logprobs
            completion = parse_completion(data, version, top=top, prompt_top=prompt_top or 0, model=model)
            logprobs = bool(self._config.logprobs)
            try:
                require_asked(completion, logprobs=logprobs, top=top, prompt=prompt_top is not None)
            except ImpossibleCall as error:
                raise ImpossibleCall(self._told(str(error)), param=error.param) from None
            return completion

        path = "chat/completions" if request.prompt is None else "completions"
        is_asked_for = self._addresses.has_several or self._provider.session_header
        conversation = conversation_key(request) if is_asked_for else ""
        completion, address = await self._answer(path, fields, request.key, conversation, read)
        return replace(completion, address=address) if self._addresses.has_several else completion

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logprob of each token given the tokens before it; 0 for the first.

        The endpoint must accept token ids and return `prompt_logprobs`, as vLLM does. Raises EngineError.
        """
        fields = {"prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}

        def read(data: bytes, version: int, model: str | None) -> tuple[float, ...]:
            try:
                rows = [*from_json(data)["choices"][0]["prompt_logprobs"]]
                values = [own for own, _ in read_prompt_logprobs(rows, ids, 0)]
            except BadAnswer as error:
                raise Retryable(f"malformed answer: {error}") from error
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise Refusal(
                    "the answer has no prompt_logprobs of the prompt's token ids; a teacher needs an "
                    "endpoint that gives them, such as vLLM"
                ) from error
            return (0.0, *values)

        return (await self._answer("completions", fields, len(ids), beginning_digest(tuple(ids)), read))[0]

    async def adopt(self, version: ModelVersion) -> None:
        """Use `version.location`, the endpoint's name for the new weights, from the next attempt on.

        Among several addresses, one without these weights is set aside by its first call until it has them.
        """
        if self._addresses.has_several and version.location != self._model:
            self._addresses.wanted = version.location
        self._model, self._version, self.adopted = version.location, version.number, version

    async def close(self) -> None:
        self._closed = True
        await self._addresses.close()

    async def _answer(
        self,
        path: str,
        fields: dict[str, Any],
        key: int,
        conversation: str,
        read: Callable[[bytes, int, str | None], T],
    ) -> tuple[T, str]:
        """POST a request with retries; return the answer as parsed by `read`, and the address that sent it.

        `read` gets the body, version and expected model. Raises EngineError, or ModelOut if no call succeeds.
        """
        routes, began = self._addresses.routes, time.monotonic()
        causes: dict[str, str] = {}
        tried: set[str] = set()
        attempts, address = 0, routes.addresses[0]

        async def attempt() -> tuple[T, str]:
            nonlocal attempts, address
            attempts += 1
            with routes.call(conversation, tried) as address:
                try:
                    return await self._attempt(address, path, fields, conversation, read), address.url
                except (Retryable, Refusal) as error:
                    causes[address.url] = str(error)
                    tried.add(address.url)
                    if self._another_may_answer(address, error) and routes.has_other(tried):
                        raise Retryable(str(error), cause=error.cause) from error
                    raise

        def again(error: Exception) -> RetryReason | None:
            if not isinstance(error, Retryable):
                return None
            if routes.has_other(tried):
                return RetryReason(error.cause, is_elsewhere=True)
            tried.clear()
            return error.again

        try:
            self._breaker.require_closed()
        except ModelOut as error:
            raise note_model_out(error) from None
        try:
            answer = await with_retries(attempt, again, self._config.retry_policy, generator(key, "retry"))
        except asyncio.CancelledError:
            # The caller gave up: the episode's time was over, or it was no longer needed.
            waited = time.monotonic() - began
            if (causes or waited >= _LONG_SECONDS) and not self._breaker.has_answered(began):
                late = f"no answer within {waited:.3g} s"
                self._failed("timeout", self._all_told(causes or {address.url: late}))
            raise
        except (Retryable, Refusal) as error:
            if isinstance(error, Refusal) and error.impossible:
                raise error.error(self._told(str(error), address.url)) from None
            last = f" (attempt {attempts}, the last)" if isinstance(error, Retryable) else ""
            raise self._failed(error.cause, self._all_told(causes, last)) from None
        self._breaker.answered()
        return answer

    def _failed(self, cause: str, message: str) -> EngineError:
        if self._closed:
            return EngineError(message)
        out = self._breaker.failed(cause, message)
        return EngineError(message) if out is None else note_model_out(out)

    def _another_may_answer(self, address: Address, error: Retryable | Refusal) -> bool:
        """Return whether another address may answer a call that this one refused; this one is set aside."""
        if not self._addresses.has_several or self._closed:
            return False
        if isinstance(error, Retryable) or error.impossible:
            return False
        # The address refuses every call: a wrong key, no such model, no money.
        address.failed += 1
        self._addresses.routes.set_aside(address, str(error))
        return True

    async def _attempt(
        self,
        address: Address,
        path: str,
        fields: dict[str, Any],
        conversation: str,
        read: Callable[[bytes, int, str | None], T],
    ) -> T:
        """Send one attempt to an address, and return the parsed answer. Raises Retryable or Refusal."""
        if self._closed:
            raise Refusal("the engine is closed")
        model, version, since = self._model, self._version, time.monotonic()
        content = encode({"model": model, **fields})
        # A router gets a digest as the conversation's name, which reveals nothing of the content.
        header = self._provider.session_header
        session = {header: beginning_digest(conversation)} if header and conversation else {}
        try:
            data = await self._addresses.post(address, path, content, session)
            try:
                # Adopted weights are requested by name: no address may substitute others.
                result = read(data, version, None if self._addresses.wanted is None else model)
            except (Retryable, Refusal, ImpossibleCall):
                note_charged(charged_for(data))
                raise
        except Retryable as error:
            self._addresses.routes.failed(address, since, str(error), is_gone=error.is_gone)
            raise
        if model == self._model:
            self._addresses.routes.answered(address)
        return result

    def _all_told(self, causes: dict[str, str], attempts: str = "") -> str:
        """Return the error of a call that no address answered, with the cause at each address."""
        if not self._addresses.has_several:
            [(url, cause)] = causes.items()
            return self._told(f"{cause}{attempts}", url)
        aside = {
            address.url: f"set aside: {address.reason}"
            for address in self._addresses.routes.addresses
            if address.is_aside
        }
        each = "; ".join(f"{url}: {cause}" for url, cause in (aside | causes).items())
        return self._told(f"{each}{attempts}", f"{len(self._addresses.routes.addresses)} addresses")

    def _told(self, reason: str, where: str | None = None) -> str:
        """Return the reason of an error with model and address, without secrets."""
        where = where or self._config.address
        return f"model '{self._model}' at {where}: {masked(reason)}"


@register_llm(config_type=OpenAiLlmConfig)
async def openai_llm(config: OpenAiLlmConfig, builder: Builder) -> AsyncIterator[OpenAiEngine]:
    """A model behind an OpenAI-compatible endpoint."""
    engine = OpenAiEngine(config)
    try:
        yield engine
    finally:
        await engine.close()
