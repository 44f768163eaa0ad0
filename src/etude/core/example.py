"""An example: one row of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """One dataset row, as workflows and evaluators see it."""

    id: str
    """Unique within its dataset, and stable: groups, resume and curriculum go by it."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What the agent is given, by column name."""

    expected: Any = None
    """The expected answer, or None where there is none."""
