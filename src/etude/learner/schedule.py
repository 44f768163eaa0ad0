"""Learning-rate schedules: how the rate rises at the start of a run and falls towards its end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]
"""How the rate falls: not at all, along a line, or along half a wave (Loshchilov and Hutter, 2017)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of every optimiser step, as a share of the highest.

    The rate falls with the share of the run that is done, counted in trainings (a job's data, once through
    the learner) and not in steps: how many steps the later ones take is not known before they are collected.
    """

    shape: Shape = "constant"
    warmup_steps: int = 0
    """Steps over which the rate rises from 0, counted over the whole run."""
    floor: float = 0.0
    """The share that is left at the end of the run, and after it."""
    trainings: int = 1
    """Trainings of the run. The rate falls over all of them together."""

    def share(self, step: int, trained: int, part: float) -> float:
        """The share of the highest rate for a step.

        `step` counts from 1 over the whole run, `trained` are the trainings that are over, and `part` is how
        much of this one was done before the step, in [0, 1).
        """
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        done = min(1.0, (trained + part) / self.trainings)
        return warm * (self.floor + (1.0 - self.floor) * self._fall(done))

    def _fall(self, done: float) -> float:
        if self.shape == "linear":
            return 1.0 - done
        if self.shape == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0
