"""Durations in words."""

from __future__ import annotations


def shown_seconds(seconds: float) -> str:
    """A duration as one says it: `3.2 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
