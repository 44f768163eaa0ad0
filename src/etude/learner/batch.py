"""What a learner is handed: token sequences with per-token data, and nothing about algorithms."""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence of token ids. All per-token fields have the length of `ids`."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    """Share of this token in the loss; 0 for tokens that the policy did not choose."""
    advantages: tuple[float, ...]
    """How much better than expected the choice of this token was; 1 where the method has none."""
    logprobs: tuple[float, ...]
    """Logprob under the policy that sampled the token; 0 where it was not sampled."""
    temperatures: tuple[float, ...] = ()
    """Temperature that each token was sampled at, which its logprob is under; empty: all at 1."""

    def __post_init__(self) -> None:
        fields = [self.ids, self.weights, self.advantages, self.logprobs, self.temperatures or self.ids]
        lengths = {len(field) for field in fields}
        if len(lengths) != 1:
            raise ValueError(f"per-token fields differ in length: {sorted(lengths)}")

    @property
    def has_gradient(self) -> bool:
        """Whether any token has both a weight and an advantage."""
        return any(map(mul, self.weights, self.advantages))


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Sequences of one job, in units that must be learned from together."""

    units: tuple[tuple[TokenSequence, ...], ...]
    """One sequence a unit, or (chosen, rejected) for preferences."""
