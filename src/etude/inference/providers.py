"""Providers of OpenAI-compatible endpoints: how they differ, in one place and as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

ProviderName = Literal["openai", "openrouter", "vllm", "etude", "other"]


@dataclass(frozen=True, slots=True)
class Provider:
    """What an endpoint gives, and how it wants to be asked."""

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
    reasoning: tuple[str, ...] = ()
    """Models that think first, and take no sampling parameters; a date may follow the name."""

    def thinks(self, model: str) -> bool:
        """Whether a model takes neither sampling parameters nor a request for logprobs."""
        base = model.removeprefix("ft:").split(":")[0]
        return any(re.fullmatch(rf"{re.escape(name)}(-\d.*)?", base) for name in self.reasoning)


_PLAIN_SAMPLING = MappingProxyType({"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0})
"""vLLM fills these in from the model's own generation config where a request leaves them open; the
logprobs it reports are then not those of the distribution that it sampled from."""

NOT_FOR_REASONING = ("temperature", "top_p", "stop")
"""Fields of a request that OpenAI's reasoning models refuse."""

PROVIDERS: Mapping[str, Provider] = MappingProxyType(
    {
        one.name: one
        for one in (
            Provider(
                "openai",
                hosts=("api.openai.com",),
                max_tokens="max_completion_tokens",
                reasoning=("o1", "o1-mini", "o3", "o3-mini", "o4-mini", "gpt-5", "gpt-5-mini", "gpt-5-nano"),
            ),
            Provider(
                "openrouter",
                hosts=("openrouter.ai",),
                # Many of the endpoints behind it have none, and it drops the request for them silently.
                logprobs=False,
                with_logprobs=MappingProxyType({"provider": {"require_parameters": True}}),
            ),
            Provider("vllm", token_ids=True, with_token_ids=_PLAIN_SAMPLING),
            Provider("etude", token_ids=True),
            Provider("other", with_token_ids=_PLAIN_SAMPLING),
        )
    }
)


def provider_at(url: str) -> Provider:
    """The provider that has an address; one that nobody is known by is `other`."""
    host = urlsplit(url).hostname or ""
    known = (
        one for one in PROVIDERS.values() for name in one.hosts if host == name or host.endswith(f".{name}")
    )
    return next(known, PROVIDERS["other"])
