"""Sampling on the level of tokens: a prompt's ids in, sampled ids out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from etude.core.call import Sampling

if TYPE_CHECKING:
    from etude.models.speech import Speech

TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids and their logprobs, the most likely first."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """What an engine is asked to continue."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    key: int = 0
    """Seed of the request's randomness, where `sampling` has none."""
    conversation: str = ""
    """A hint for the reuse of the KV cache."""
    top: int = 0
    """How many of the most likely tokens to tell for each sampled one."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token, as soon as it is sampled."""

    id: int
    logprob: float
    top: TopLogprobs = ()


OnToken: TypeAlias = Callable[[SampledToken], None]
"""Told of each token in its turn, in the event loop that waits for the request."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine sampled."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """The end of turn included."""
    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...]
    """One for each token; empty where none were asked for."""
    text: str
    """Without the end of turn, and cut before a stop string."""
    finish_reason: str
    """`stop` or `length`."""
    version: int
    """Of the weights that sampled the last token."""


class TokenEngine(Protocol):
    """Whatever samples tokens after tokens."""

    @property
    def speech(self) -> Speech:
        """How the model reads and writes."""

    async def sample(self, request: TokenRequest, on_token: OnToken | None = None) -> Sampled:
        """Continue a prompt; `on_token` is told of each token as it is sampled.

        Raises EngineError when that cannot be; cancelling the call frees what it held.
        """

    async def close(self) -> None:
        """Free what it holds; requests still in it fail."""
