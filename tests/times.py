"""Times in what runs keep: they differ each time that the same is played."""

from __future__ import annotations

from typing import Any

TIMES = frozenset(
    {
        *("timestamp", "seconds", "began", "timed", "started_at", "ended_at"),
        *("collecting_seconds", "training_seconds", "tokens_per_s"),
    }
)
"""The names of fields that have them."""


def without_times(value: Any, *others: str) -> Any:
    """A value of JSON without the fields that have times, and without `others`."""
    if isinstance(value, dict):
        left_out = TIMES.union(others)
        return {key: without_times(each, *others) for key, each in value.items() if key not in left_out}
    return [without_times(each, *others) for each in value] if isinstance(value, list) else value
