"""How the losses of tokens become one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from etude.learner.batch import TokenSequence

Aggregation = Literal["token", "sequence", "constant"]
"""`token` weighs all tokens of a step alike (DAPO, Yu et al., 2025), `sequence` all sequences alike
(GRPO, Shao et al., 2024), `constant` divides by a fixed length (Dr. GRPO, Liu et al., 2025)."""


def normalised(
    units: Sequence[Sequence[TokenSequence]], aggregation: Aggregation, constant_length: int
) -> list[list[float]]:
    """For every sequence of an optimiser step, the factor of its weights. See `Objective.normalised`."""
    masses = [[sum(sequence.weights) for sequence in unit] for unit in units]
    rows = sum(1 for unit in masses for mass in unit if mass)
    tokens = sum(sum(unit) for unit in masses)
    if aggregation == "token":
        return [[1.0 / max(tokens, 1e-9)] * len(unit) for unit in masses]
    if aggregation == "constant":
        return [[1.0 / (rows * constant_length)] * len(unit) for unit in masses]
    return [[1.0 / (rows * mass) if mass else 0.0 for mass in unit] for unit in masses]
