"""The engine for any endpoint that speaks OpenAI's chat completions, near or far."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import stamina
from pydantic_core import from_json

from etude.config.registry import register_llm
from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError, ImpossibleCall
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion
from etude.core.keys import generator
from etude.inference.engine import note_failed_attempt, note_retry
from etude.inference.http_addresses import HttpAddresses
from etude.inference.openai_config import NOT_FOR_REASONING, OpenAiLlmConfig
from etude.inference.routes import Address, beginning, conversation_of
from etude.wire.asking import USUAL_FIELDS, request_fields
from etude.wire.client import Disturbed, Refused, encode, parse_completion
from etude.wire.logprobs import require_asked, require_possible

if TYPE_CHECKING:
    from etude.config.builder import Builder

_SILENT = logging.NullHandler()

T = TypeVar("T")


class OpenAiEngine(Engine):
    """Samples from a model behind HTTP. Concurrent calls are sent at once; the endpoint batches them."""

    def __init__(self, config: OpenAiLlmConfig) -> None:
        self._config = config
        self._addresses = HttpAddresses(config)
        self._provider = config.provider_there
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

        def read(data: bytes, version: int, model: str | None) -> Completion:
            prompt_top, vocabulary = request.prompt_logprobs or 0, self._config.vocabulary
            completion = parse_completion(
                data, version, vocabulary, top=top, prompt_top=prompt_top, model=model
            )
            self._require_asked(completion, request, top)
            return completion

        path = "chat/completions" if request.prompt is None else "completions"
        conversation = conversation_of(request) if self._addresses.are_several else ""
        completion, address = await self._answer(path, fields, request.key, conversation, read)
        return replace(completion, address=address) if self._addresses.are_several else completion

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

        def read(data: bytes, version: int, model: str | None) -> tuple[float, ...]:
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

        return (await self._answer("completions", fields, len(ids), beginning(tuple(ids)), read))[0]

    async def adopt(self, version: ModelVersion) -> None:
        """Ask for `version.location`, the endpoint's name for the new weights, from the next attempt on.

        Of several addresses, those that do not have it are set aside until they do. Raises EngineError where
        none has.
        """
        if (version.location, version.number) == (self._model, self._version):
            return
        addresses, before = self._addresses, self._addresses.wanted
        lacking: dict[Address, str] = {}
        if addresses.are_several:
            addresses.wanted, every = version.location, addresses.routes.addresses
            lacked = [address.lacks_model for address in every]
            reasons = await asyncio.gather(*map(addresses.lacking, every))
            lacking = {address: why for address, why in zip(every, reasons, strict=True) if why}
            if len(lacking) == len(every):
                addresses.wanted = before
                for address, was_lacking in zip(every, lacked, strict=True):
                    address.lacks_model = was_lacking
                causes = "; ".join(f"{address.url}: {why}" for address, why in lacking.items())
                raise EngineError(f"no address can answer for the model '{version.location}': {causes}")
        self._model, self._version, self.adopted = version.location, version.number, version
        for address, why in lacking.items():
            addresses.set_aside(address, why)

    def address_states(self) -> dict[str, str]:
        """How each of several addresses is; nothing for a single one."""
        return self._addresses.states() if self._addresses.are_several else {}

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
        """The result of `read`, given an answer and the version that gave it, and the address.

        Raises EngineError.
        """
        config, routes = self._config, self._addresses.routes
        causes: dict[str, str] = {}
        tried: set[str] = set()

        def wait(error: Exception) -> bool | float:
            if not isinstance(error, Disturbed):
                return False
            if routes.has_other(tried):
                return 0.0
            tried.clear()
            if error.retry_after is None:
                return True
            # Calls that were turned away together should not come back together.
            spread = generator(key, "retry").uniform(0, config.retry_wait)
            return min(error.retry_after + spread, config.max_retry_wait)

        most = config.max_retries + len(routes.addresses)
        attempts = stamina.retry_context(
            on=wait,
            attempts=most,
            timeout=None,
            wait_initial=config.retry_wait,
            wait_max=config.max_retry_wait,
            wait_jitter=config.retry_wait,
        )
        address = routes.addresses[0]
        try:
            async for attempt in attempts:
                if attempt.num > 1:
                    note_retry()
                with attempt, routes.call(conversation, tried) as address:
                    try:
                        return await self._attempt(address, path, fields, read), address.url
                    except (Disturbed, Refused) as error:
                        causes[address.url] = str(error)
                        tried.add(address.url)
                        if self._another_may_answer(address, error) and routes.has_other(tried):
                            raise Disturbed(str(error)) from error
                        raise
        except Refused as error:
            if not error.impossible:
                raise EngineError(self._all_told(causes)) from None
            raise error.error(self._told(str(error), address.url)) from None
        except Disturbed:
            raise EngineError(self._all_told(causes, f" (attempt {most}, the last)")) from None
        raise AssertionError("the loop above returns or raises")

    def _another_may_answer(self, address: Address, error: Disturbed | Refused) -> bool:
        """Note a failed attempt at one of several addresses; whether another may do what this one refused."""
        if not self._addresses.are_several or self._closed:
            return False
        note_failed_attempt(address.url)
        if isinstance(error, Disturbed) or error.impossible:
            return False
        self._addresses.refused(address, str(error))
        return True

    async def _attempt(
        self, address: Address, path: str, fields: dict[str, Any], read: Callable[[bytes, int, str | None], T]
    ) -> T:
        """The content of an address's answer. Raises Disturbed or Refused."""
        if self._closed:
            raise Refused("the engine is closed")
        if address.lacks_model:
            raise Disturbed(address.reason)
        model, version, since = self._model, self._version, time.monotonic()
        content = encode({"model": model, **fields})
        try:
            data = await self._addresses.post(address, path, content)
            # Weights that were adopted are asked for by name: no address may put others in their place.
            result = read(data, version, None if self._addresses.wanted is None else model)
        except Disturbed as error:
            self._addresses.failed(address, since, error)
            raise
        if model == self._model:
            self._addresses.routes.answered(address)
        return result

    def _all_told(self, causes: dict[str, str], attempts: str = "") -> str:
        """The error of a call that no address answered, with the cause of each."""
        if not self._addresses.are_several:
            [(url, cause)] = causes.items()
            return self._told(f"{cause}{attempts}", url)
        aside = {
            address.url: f"set aside: {address.reason}"
            for address in self._addresses.routes.addresses
            if address.state == "aside"
        }
        each = "; ".join(f"{url}: {cause}" for url, cause in (aside | causes).items())
        return self._told(f"{each}{attempts}", f"{len(self._addresses.routes.addresses)} addresses")

    def _told(self, reason: str, where: str | None = None) -> str:
        """The reason of an error with model and address, and without secrets."""
        where = where or self._config.address
        return f"model '{self._model}' at {where}: {self._addresses.masked(reason)}"


@register_llm(config_type=OpenAiLlmConfig)
async def openai_llm(config: OpenAiLlmConfig, builder: Builder) -> AsyncIterator[OpenAiEngine]:
    """A model behind an OpenAI-compatible endpoint."""
    engine = OpenAiEngine(config)
    try:
        yield engine
    finally:
        await engine.close()
