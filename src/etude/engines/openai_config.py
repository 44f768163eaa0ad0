"""The config of a model behind an OpenAI-compatible endpoint, and how the providers differ."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator

from etude.config.component import CHANGEABLE, LlmConfig
from etude.core.call import Sampling
from etude.wire.client import VLLM_FIELDS
from etude.wire.retries import USUAL, RetryPolicy

ProviderName = Literal["openai", "openrouter", "vllm", "etude", "other"]


@dataclass(frozen=True, slots=True)
class Provider:
    """An endpoint's abilities, and the form of request that it expects."""

    name: ProviderName
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
    with_logprobs: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to requests for logprobs."""
    more: frozenset[str] = frozenset()
    """Fields beyond OpenAI's that it accepts."""
    with_more: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to requests that not every model there supports."""
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


_PLAIN_SAMPLING = MappingProxyType({"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0})
"""Without these, vLLM uses the model's own generation config, and its logprobs do not match its sampling."""

_ROUTED = MappingProxyType({"provider": {"require_parameters": True}})
"""Without this, OpenRouter silently drops fields that the endpoint behind it does not accept."""

NOT_FOR_REASONING = ("temperature", "top_p", "stop")
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


OPENAI_URL = "https://api.openai.com/v1"


def plain_address(value: str) -> str:
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


PlainAddress: TypeAlias = Annotated[str, AfterValidator(plain_address)]
"""An address without a slash at the end."""

_OWN_FIELDS = frozenset({"model", "messages", "tools", "stream", "n"})


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
        clash = sorted(_OWN_FIELDS & value.keys())
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
        host, name = f".{urlsplit(self.address).hostname or ''}", self.provider
        if name == "auto":
            name = next(
                (each.name for each in _ALL if host.endswith(tuple(f".{own}" for own in each.hosts))), "other"
            )
        return PROVIDERS[name]

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
    def retry_policy(self) -> RetryPolicy:
        """The retry policy of calls."""
        return replace(USUAL, retries=self.max_retries)

    @property
    def sampling(self) -> Sampling:
        """The sampling options for calls that set none."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens)
