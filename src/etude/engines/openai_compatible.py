"""Models behind endpoints with OpenAI's chat completions API: how the providers differ, config and engine."""

import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator
from pydantic_core import from_json

from etude.config.builder import Builder
from etude.config.component import CHANGEABLE, LlmConfig
from etude.config.registry import register_llm
from etude.core.call import ChatRequest, Completion, Sampling
from etude.core.errors import EngineError, ImpossibleCall, RequestError
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion
from etude.core.keys import generator
from etude.core.secrets import keep_secret, mask_secrets
from etude.wire.client import (
    USUAL_FIELDS,
    VLLM_FIELDS,
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
from etude.wire.retries import USUAL, Refusal, Retryable, note_charged, with_retries

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Provider:
    """An endpoint's abilities, and the form of request that it expects."""

    name: str
    hosts: tuple[str, ...] = ()
    """Host names that identify it."""
    token_ids: bool = False
    """Whether it returns sampled token ids on request, as vLLM >= 0.10.2 does."""
    logprobs: bool = True
    """Whether it returns logprobs on request, for any model."""
    max_tokens: str = "max_tokens"
    """Its field for the maximum number of tokens of a completion."""
    with_token_ids: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to requests for token ids, to sample from the plain distribution."""
    more: frozenset[str] = frozenset()
    """Fields beyond OpenAI's that it accepts."""
    with_more: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to requests that not every model there supports, such as for logprobs."""
    session_header: str = ""
    """A header for the conversation's name, by which a router keeps it at one server."""
    thinking: str | None = "reasoning_content"
    """Its field for a model's reasoning in messages that it receives; None if it accepts none."""
    reasoning: tuple[str, ...] = ()
    """Models that reason first and accept no sampling parameters; a date may follow the name."""

    def is_reasoning_model(self, model: str) -> bool:
        """Return whether a model accepts neither sampling parameters nor a request for logprobs."""
        base = model.removeprefix("ft:").split(":")[0]
        return any(re.fullmatch(rf"{re.escape(name)}(-\d.*)?", base) for name in self.reasoning)


_PLAIN_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Without these, vLLM uses the model's own generation config, and its logprobs do not match its sampling."""

_NOT_FOR_REASONING = ("temperature", "top_p", "stop")
"""Request fields that OpenAI's reasoning models refuse."""

_ALL = (
    Provider(
        "openai",
        hosts=("api.openai.com",),
        max_tokens="max_completion_tokens",
        reasoning=("o1", "o1-mini", "o3", "o3-mini", "o4-mini", "gpt-5", "gpt-5-mini", "gpt-5-nano"),
        thinking=None,
    ),
    Provider(
        "openrouter",
        hosts=("openrouter.ai",),
        logprobs=False,  # Many endpoints behind it have none.
        more=frozenset({"top_k", "min_p", "repetition_penalty"}),
        # Without this, it silently drops fields that the endpoint behind it does not accept.
        with_more={"provider": {"require_parameters": True}},
        thinking="reasoning",
    ),
    Provider(
        "vllm",
        token_ids=True,
        with_token_ids=_PLAIN_SAMPLING,
        more=VLLM_FIELDS,
        session_header="x-session-id",
    ),
    Provider("etude", token_ids=True, more=VLLM_FIELDS),
    Provider("other", with_token_ids=_PLAIN_SAMPLING),
)

OPENAI_URL = "https://api.openai.com/v1"


def _plain_address(value: str) -> str:
    """Strip the slash at the end of an address. Raises ValueError if it is invalid or has a password."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an address like http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("an address with a password in it would be shown in errors; use `api_key`")
    if parts.query or parts.fragment:
        raise ValueError("expected an address without `?` and `#`")
    if "," in value:
        raise ValueError("expected one address: put a router in front of several servers")
    return value.rstrip("/")


PlainAddress: TypeAlias = Annotated[str, AfterValidator(_plain_address)]
"""An address without a slash at the end."""


class OpenAiLlmConfig(LlmConfig, name="openai"):
    """A model behind an OpenAI-compatible endpoint: OpenAI, vLLM, SGLang, llama.cpp, a router."""

    model_name: str = Field(min_length=1)
    """The endpoint's name for the model."""
    base_url: PlainAddress | None = None
    """The address without `/chat/completions`. By default `OPENAI_BASE_URL`, or else OpenAI."""
    api_key: SecretStr | None = None
    """Your API key. By default `OPENAI_API_KEY`; without either, no key is sent. OpenAI itself needs one."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the probability mass to keep."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of one completion."""
    request_timeout: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds for one attempt in total."""
    max_retries: Annotated[int, CHANGEABLE] = Field(default=USUAL.retries, ge=0)
    """Retries after 408, 409, 425, 429, 5xx, a lost connection or a malformed answer."""
    provider: Literal["auto", "openai", "openrouter", "vllm", "etude", "other"] = "auto"
    """The kind of server; `auto` infers it from the address. Set `vllm`, or `etude` for `etude serve`, to get
    token ids."""
    logprobs: bool | None = None
    """Ask for the sampled tokens' logprobs. With `true`, a call whose answer has none fails. By default they
    are requested if provider and model return them. At temperatures other than 1, run a vLLM server with
    `--logprobs-mode processed_logprobs`, so that they describe the distribution sampled from."""
    return_token_ids: bool | None = None
    """Ask for token ids, as vLLM >= 0.10.2 returns them. GRPO on this model needs them. By default they are
    requested if the provider returns them. With the providers `vllm` and `other`, this also disables the
    model's own top_k, min_p and repetition penalty; set them in `extra_body` if you need them."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Additional request headers."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of the request body."""
    omit: list[Literal["temperature", "top_p", "seed", "max_tokens", "stop"]] = Field(default_factory=list)
    """Fields to leave out of requests because the endpoint does not accept them."""

    @field_validator("extra_body")
    @classmethod
    def _refuse_own_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        clash = sorted({"model", "messages", "tools", "stream", "n"} & value.keys())
        if clash:
            raise ValueError(f"cannot set {', '.join(clash)}: the engine sets it itself")
        return value

    @property
    def address(self) -> str:
        """The address: from `base_url`, else from the environment, else OpenAI's."""
        return self.base_url or os.environ.get("OPENAI_BASE_URL", "").strip().rstrip("/") or OPENAI_URL

    @property
    def provider_there(self) -> Provider:
        """The provider: as configured, or inferred from the address; `other` if the host is unknown."""
        host = f".{urlsplit(self.address).hostname or ''}"
        for each in _ALL if self.provider == "auto" else ():
            if host.endswith(tuple(f".{own}" for own in each.hosts)):
                return each
        return next((each for each in _ALL if each.name == self.provider), _ALL[-1])

    @property
    def asks_for_token_ids(self) -> bool:
        """Whether requests ask for the sampled token ids."""
        return self.provider_there.token_ids if self.return_token_ids is None else self.return_token_ids

    @property
    def takes(self) -> frozenset[str]:
        """The fields beyond OpenAI's that the endpoint accepts; all of vLLM's if it returns token ids."""
        return VLLM_FIELDS if self.asks_for_token_ids else self.provider_there.more

    @property
    def asks_for_logprobs(self) -> bool:
        """Whether requests ask for the sampled tokens' logprobs."""
        provider = self.provider_there
        gives = provider.logprobs and not provider.is_reasoning_model(self.model_name)
        return gives if self.logprobs is None else self.logprobs

    @property
    def sampling(self) -> Sampling:
        """The sampling options for calls that set none."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens)


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
        headers = {name: value.get_secret_value() for name, value in config.headers.items()}
        keep_secret(*headers.values())
        key = config.api_key.get_secret_value() if config.api_key else os.environ.get("OPENAI_API_KEY", "")
        if key := key.strip():
            keep_secret(key)
            headers = {"authorization": f"Bearer {key}", **headers}
        elif config.address == OPENAI_URL:
            raise RequestError(
                f"model '{config.model_name}' should be sampled from OpenAI, but there is no API key. "
                "Set OPENAI_API_KEY, or `api_key`, or `base_url` for another endpoint."
            )
        self._client = HttpClient(headers)
        self._provider = config.provider_there
        self._model = config.model_name
        self._version = 0
        self.adopted: ModelVersion | None = None
        self._closed = False
        is_reasoning = self._provider.is_reasoning_model(config.model_name)
        self._omitted = (*config.omit, *(_NOT_FOR_REASONING if is_reasoning else ()))
        self._fixed_fields: dict[str, Any] = {}
        if config.asks_for_logprobs:
            self._fixed_fields |= {"logprobs": True, **self._provider.with_more}
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
        top, fixed = request.top_logprobs, dict(self._fixed_fields)
        if top and self._config.asks_for_token_ids:
            fixed["return_tokens_as_token_ids"] = True
        if top and request.prompt is None:
            fixed |= {"logprobs": True, "top_logprobs": top}
        elif request.prompt is not None and (top or "logprobs" in fixed):
            fixed["logprobs"] = top  # The completions API has one field for both.
        fields = fixed | fields | self._config.extra_body

        def read(data: bytes, version: int) -> Completion:
            completion = parse_completion(data, version, top=top)
            try:
                require_asked(completion, logprobs=bool(self._config.logprobs), top=top)
            except ImpossibleCall as error:
                raise ImpossibleCall(self._name_model(str(error)), param=error.param) from None
            return completion

        path = "chat/completions" if request.prompt is None else "completions"
        header = self._provider.session_header
        session = {header: beginning_digest(conversation_key(request))} if header else {}
        return await self._answer(path, fields, request.key, session, read)

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

        policy = replace(USUAL, retries=self._config.max_retries)
        try:
            return await with_retries(attempt, policy=policy, spread=generator(key, "retry"))
        except (Retryable, Refusal) as error:
            if isinstance(error, Refusal) and error.impossible:
                raise error.error(self._name_model(str(error))) from None
            last = f" (attempt {attempts}, the last)" if isinstance(error, Retryable) else ""
            advice = f"; {_WHAT_TO_DO[error.cause]}" if error.cause in _WHAT_TO_DO else ""
            raise EngineError(self._name_model(f"{error}{last}{advice}")) from None

    def _name_model(self, reason: str) -> str:
        """Return the reason of an error with model and address, without secrets."""
        return f"model '{self._model}' at {self._address}: {mask_secrets(reason)}"


@register_llm(config_type=OpenAiLlmConfig)
async def openai_llm(config: OpenAiLlmConfig, builder: Builder) -> AsyncIterator[OpenAiEngine]:
    """A model behind an OpenAI-compatible endpoint."""
    engine = OpenAiEngine(config)
    try:
        yield engine
    finally:
        await engine.close()
