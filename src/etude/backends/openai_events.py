"""What the events of a job tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai.types.fine_tuning import FineTuningJobEvent


def metrics_of(events: Sequence[FineTuningJobEvent]) -> dict[str, float]:
    """The numbers that the latest of the events tells; the events are oldest first."""
    for event in reversed(events):
        if isinstance(event.data, Mapping) and event.type == "metrics":
            return {
                str(key): value
                for key, value in event.data.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
    return {}


def progress_of(metrics: Mapping[str, float]) -> float | None:
    """Percent done, where the events say `step` and `total_steps`."""
    step, total = metrics.get("step"), metrics.get("total_steps")
    return min(100.0, 100.0 * step / total) if step is not None and total else None
