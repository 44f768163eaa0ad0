"""The config of a model behind an OpenAI-compatible endpoint, and how the providers of these differ."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator

from etude.config.component import CHANGEABLE, LlmConfig
from etude.core.call import Sampling
from etude.wire.client import VLLM_FIELDS
from etude.wire.retries import USUAL, USUAL_MEGABYTES, RetryPolicy

ProviderName = Literal["openai", "openrouter", "vllm", "etude", "other"]


@dataclass(frozen=True, slots=True)
class Provider:
    """The abilities of an endpoint, and how it wants to be asked."""

    name: ProviderName
    hosts: tuple[str, ...] = ()
    """Addresses by which it is known."""
    token_ids: bool = False
    """Tells the sampled token ids on request, as vLLM >= 0.10.2 does."""
    logprobs: bool = True
    """Tells logprobs on request, whatever the model."""
    max_tokens: str = "max_tokens"
    """Its name for the most tokens of a completion."""
    with_token_ids: Mapping[str, Any] = field(default_factory=dict)
    """Fields sent along where token ids are asked for, to sample from the plain distribution."""
    with_logprobs: Mapping[str, Any] = field(default_factory=dict)
    """Fields sent along where logprobs are asked for."""
    more: frozenset[str] = frozenset()
    """Fields beyond OpenAI's that it takes."""
    with_more: Mapping[str, Any] = field(default_factory=dict)
    """Fields sent along with what not every model there can do."""
    session_header: str = ""
    """A header that gets a name of the conversation, by which a router keeps it at one server."""
    thinking: str | None = "reasoning_content"
    """Its name for what a model thought, in messages that it is sent; None where it takes none."""
    reasoning: tuple[str, ...] = ()
    """Models that think first, and take no sampling parameters; a date may follow the name."""

    def thinks(self, model: str) -> bool:
        """Whether a model takes neither sampling parameters nor a request for logprobs."""
        base = model.removeprefix("ft:").split(":")[0]
        return any(re.fullmatch(rf"{re.escape(name)}(-\d.*)?", base) for name in self.reasoning)


_PLAIN_SAMPLING = MappingProxyType({"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0})
"""vLLM fills these in from the model's own generation config where a request leaves them open; the
logprobs it reports are then not those of the distribution that it sampled from."""

_ROUTED = MappingProxyType({"provider": {"require_parameters": True}})
"""Or OpenRouter drops silently what the endpoint behind it does not take."""

NOT_FOR_REASONING = ("temperature", "top_p", "stop")
"""Fields of a request that OpenAI's reasoning models refuse."""

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
        logprobs=False,  # Many of the endpoints behind it have none.
        with_logprobs=_ROUTED,
        more=frozenset({"top_k", "min_p", "repetition_penalty"}),
        with_more=_ROUTED,
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
PROVIDERS: Mapping[str, Provider] = MappingProxyType({provider.name: provider for provider in _ALL})


def provider_at(url: str) -> Provider:
    """The provider that has an address; one that nobody is known by is `other`."""
    host = urlsplit(url).hostname or ""
    known = (provider for provider in _ALL if any(f".{host}".endswith(f".{name}") for name in provider.hosts))
    return next(known, PROVIDERS["other"])


OPENAI_URL = "https://api.openai.com/v1"

_OWN_FIELDS = frozenset({"model", "messages", "tools", "stream", "n"})


class OpenAiLlmConfig(LlmConfig, name="openai"):
    """A model behind an OpenAI-compatible endpoint: OpenAI, vLLM, SGLang, llama.cpp, a router."""

    model_name: str = Field(min_length=1)
    """The endpoint's name for the model."""
    base_url: str | list[str] | None = None
    """Address that ends before `/chat/completions`. Left out: `OPENAI_BASE_URL`, else OpenAI. Several that
    serve the same model, as a list or with commas between them, share its conversations: each stays at one,
    and goes on at another when that fails."""
    api_key: SecretStr | None = None
    """Left out: `OPENAI_API_KEY`, else none is sent."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: probability mass kept."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one completion."""
    request_timeout: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds for one attempt, all in all."""
    max_retries: Annotated[int, CHANGEABLE] = Field(default=USUAL.retries, ge=0)
    """More attempts after 408, 409, 425, 429, 5xx, a lost connection or a malformed answer. Each address but
    the first adds one, and another address is tried without a wait."""
    retry_wait: Annotated[float, CHANGEABLE] = Field(default=USUAL.first_wait, ge=0)
    """Longest wait in seconds before the first retry; doubles with each. Any shorter wait is as likely.
    `Retry-After` goes first."""
    max_retry_wait: Annotated[float, CHANGEABLE] = Field(default=USUAL.longest_wait, ge=0)
    """Longest wait in seconds between two attempts."""
    stop_after: Annotated[int | None, CHANGEABLE] = Field(default=5, ge=1)
    """Calls that may fail for one cause (a wrong key, a dead host, a model that hangs), none answered between
    them, before the run stops with that cause; null: any number."""
    max_answer_mb: Annotated[float, CHANGEABLE] = Field(default=USUAL_MEGABYTES, gt=0)
    """Megabytes that one answer may have, after its expansion where it is compressed."""
    provider: Literal["auto", "openai", "openrouter", "vllm", "etude", "other"] = "auto"
    """Who answers there; `auto` goes by the address. Say `vllm`, or `etude` for `etude serve`, to have token
    ids."""
    logprobs: bool | None = None
    """Ask for the sampled tokens' logprobs; with `true` a call whose answer has none fails, left out they are
    asked for where the provider tells them. At temperatures other
    than 1 a vLLM server must run with `--logprobs-mode processed_logprobs` for them to be those of the
    sampling distribution."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Ask for the most likely tokens as well; a call whose answer has none fails."""
    return_token_ids: bool | None = None
    """Ask for token ids, as vLLM >= 0.10.2 gives them; GRPO on this model needs them. Left out: where the
    provider tells them. But for `etude` it also switches off the model's own top_k, min_p and repetition
    penalty; `extra_body` can set them again."""
    vocabulary: int | None = Field(default=None, ge=1)
    """Number of the model's tokens: an answer with an id that none of them has is a failed call."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """More request headers."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request body."""
    omit: list[Literal["temperature", "top_p", "seed", "max_tokens", "stop"]] = Field(default_factory=list)
    """Fields that the endpoint does not take and that are not sent."""

    @field_validator("base_url")
    @classmethod
    def _plain_addresses(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is None:
            return None
        several = value.split(",") if isinstance(value, str) else value
        addresses = [plain_address(address.strip()) for address in several]
        if not addresses:
            raise ValueError("expected at least one address; leave the key out for OpenAI's")
        if repeated := {address for address in addresses if addresses.count(address) > 1}:
            raise ValueError(f"has an address twice: {', '.join(sorted(repeated))}")
        return addresses[0] if len(addresses) == 1 else addresses

    @field_validator("extra_body")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        clash = sorted(_OWN_FIELDS & value.keys())
        if clash:
            raise ValueError(f"cannot set {', '.join(clash)}: the engine sets it itself")
        return value

    @property
    def addresses(self) -> list[str]:
        """Where requests go: `base_url`, or else what the environment says, or else OpenAI."""
        if isinstance(self.base_url, list):
            return self.base_url
        given = self.base_url or os.environ.get("OPENAI_BASE_URL", "") or OPENAI_URL
        return [address.strip().rstrip("/") for address in given.split(",")]

    @property
    def address(self) -> str:
        """The first of the addresses: that of everything but model calls."""
        return self.addresses[0]

    @property
    def provider_there(self) -> Provider:
        """Who answers there, and how."""
        return provider_at(self.address) if self.provider == "auto" else PROVIDERS[self.provider]

    @property
    def asks_for_token_ids(self) -> bool:
        """Whether requests ask for the sampled token ids."""
        return self.provider_there.token_ids if self.return_token_ids is None else self.return_token_ids

    @property
    def takes(self) -> frozenset[str]:
        """The fields beyond OpenAI's that the endpoint takes: whoever tells token ids speaks as vLLM does."""
        return VLLM_FIELDS if self.asks_for_token_ids else self.provider_there.more

    @property
    def asks_for_logprobs(self) -> bool:
        """Whether requests ask for the sampled tokens' logprobs."""
        provider = self.provider_there
        gives = provider.logprobs and not provider.thinks(self.model_name)
        return gives if self.logprobs is None else self.logprobs

    @property
    def retry_policy(self) -> RetryPolicy:
        """How its calls are made again."""
        more = len(self.addresses) - 1
        return RetryPolicy(self.max_retries + more, self.retry_wait, self.max_retry_wait)

    @property
    def sampling(self) -> Sampling:
        """How to sample where a call does not say."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens)


def plain_address(value: str) -> str:
    """The address without a slash at its end. Raises ValueError unless it is one, and keeps no secret."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an address like http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("an address with a password in it would be shown in errors; use `api_key`")
    if parts.query or parts.fragment:
        raise ValueError("expected an address without `?` and `#`")
    return value.rstrip("/")


PlainAddress: TypeAlias = Annotated[str, AfterValidator(plain_address)]
"""An address, without a slash at its end."""
