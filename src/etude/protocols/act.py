"""An act: what an answer does in a play."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Act:
    """A well-formed answer."""

    messages: Mapping[str, str] = field(default_factory=dict)
    """What it says, by channel."""
    decision: float | None = None
    """In [-1, 1], from reject to accept; None when it does not decide."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """An answer that cannot be used."""

    reason: str
    """For a person: what was wrong with it."""
