"""A row: one sequence that is being sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from etude.core.call import Sampling


@dataclass(slots=True, eq=False)
class Row:
    """One sequence being sampled."""

    conversation: str
    ids: list[int]
    """Prompt, then what was sampled."""
    sampling: Sampling
    uniform: Iterator[float]
    """The row's own random numbers, one for each token."""
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens."""
    top: int = 0
    """How many of the most likely tokens to keep at each step."""
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    """For each sampled token, the most likely tokens in its place and their logprobs, best first."""
    slot: int = -1
    cached: int = 0
    """Leading tokens whose keys and values are in the slot."""

    @property
    def pending(self) -> int:
        """Tokens that the model has not read yet."""
        return len(self.ids) - self.cached
