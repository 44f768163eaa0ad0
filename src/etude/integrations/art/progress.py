"""How far a job on an ART server is, by the lines that the server has sent."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from etude.integrations.art.wire import ArtGroups

_TOTALS = ("num_gradient_steps", "data/step_num_gradient_steps")
"""The count of gradient steps that a job will make, in 0.4 and in 0.5; each line has it."""


@dataclass(slots=True)
class ArtProgress:
    """What has come of a job so far."""

    given: ArtGroups
    steps: int = 0
    """Gradient steps that were made."""
    total: int | None = None
    """Gradient steps that the server means to make."""
    _values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, line: dict[str, float]) -> None:
        """Take in the metrics of one line. A server that found nothing to train on says 0 steps."""
        told = dict(line)
        totals = [int(told.pop(name)) for name in _TOTALS if name in told]
        self.total = totals[0] if totals else self.total
        self.steps += 0 if totals and totals[0] == 0 else 1
        for name, value in told.items():
            if math.isfinite(value):
                self._values[name].append(value)

    @property
    def percent(self) -> float | None:
        """Percent done, where the server says how much there is."""
        return min(100.0, 100.0 * self.steps / self.total) if self.total else None

    @property
    def metrics(self) -> dict[str, float]:
        """The averages over the gradient steps, and what the job was given."""
        means = {name: math.fsum(values) / len(values) for name, values in self._values.items()}
        return means | {
            "gradient_steps": float(self.steps),
            "submitted_groups": float(len(self.given.groups)),
            "submitted_trajectories": float(self.given.trajectories),
            "rejected_trajectories": float(sum(self.given.rejected.values())),
        }
