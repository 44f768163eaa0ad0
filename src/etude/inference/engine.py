"""Engines that sample tokens after tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from etude.core.call import ChatRequest, Completion, Sampling, TopLogprobs

if TYPE_CHECKING:
    from etude.models.speech import Speech


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A prompt to continue, and how."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    key: int = 0
    """Seed of the request's randomness, where `sampling` has none."""
    conversation: str = ""
    """A hint for the reuse of the KV cache."""
    top: int = 0
    """How many of the most likely tokens to report for each sampled one."""
    prompt_logprobs: int | None = None
    """How many of the most likely tokens to report in the place of each one of the prompt, besides its own
    logprob; None for no logprobs of the prompt."""

    @property
    def seed(self) -> int:
        """Of the request's randomness."""
        return self.key if self.sampling.seed is None else self.sampling.seed


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token, as soon as it is sampled."""

    id: int
    logprob: float
    top: TopLogprobs = ()


OnToken: TypeAlias = Callable[[SampledToken], None]
"""Called with each token in its turn, in the event loop that waits for the request."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A continuation."""

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
    prompt_logprobs: tuple[float, ...] = ()
    """Of the prompt's tokens but the first, under the model at temperature 1; empty where not asked for."""
    prompt_top: tuple[TopLogprobs, ...] = ()
    """In the places of the same tokens."""


class TokenEngine(Protocol):
    """An engine that continues token ids."""

    @property
    def speech(self) -> Speech:
        """How the model reads and writes."""

    async def sample(self, request: TokenRequest, on_token: OnToken | None = None) -> Sampled:
        """Continue a prompt; `on_token` is called with each token as it is sampled.

        Raises EngineError when that cannot be; cancelling the call frees what it held.
        """

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample one assistant message: `etude.inference.answer.answer` over `sample`."""

    async def close(self) -> None:
        """Free what it holds; requests still in it fail."""


def before_stop(text: str, stops: Iterable[str]) -> str | None:
    """The text before the first of the stop strings in it; None where there is none."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(positions)] if positions else None
