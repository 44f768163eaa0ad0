"""The plan of a training: which rows each optimiser step is on, and how the learning rate rises and falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from etude.core.keys import generator


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step of a training."""

    number: int
    """From 1 on, over all passes."""
    of: int
    """Steps of the training in all."""
    epoch: int
    """The pass over the data that it belongs to, from 1 on."""
    rows: tuple[int, ...]
    """Indices of the rows that are learned from."""
    ends_epoch: bool

    @property
    def part(self) -> float:
        """Share of the training that is done before this step, in [0, 1)."""
        return (self.number - 1) / self.of


def plan_steps(
    live: Sequence[bool], passes: int, batch_size: int | None, seed: int, *key: str | int
) -> list[Step]:
    """All steps of a training, shuffled anew for each pass; the same arguments give the same plan.

    `live` says of each row whether there is something to learn from it. A step of rows that are not is
    left out: the optimiser's momentum would still move weights. `batch_size` None takes all rows at once.
    """
    size = batch_size or max(1, len(live))
    batches: list[tuple[int, tuple[int, ...]]] = []
    for number in range(passes):
        order = list(range(len(live)))
        if size < len(order):
            generator(seed, *key, number).shuffle(order)
        chunks = [tuple(order[at : at + size]) for at in range(0, len(order), size)]
        batches += [(number + 1, rows) for rows in chunks if any(live[row] for row in rows)]
    last = {epoch: index for index, (epoch, _) in enumerate(batches)}
    return [
        Step(index + 1, len(batches), epoch, rows, ends_epoch=last[epoch] == index)
        for index, (epoch, rows) in enumerate(batches)
    ]


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
    trainings: int = 1
    """Trainings of the run. The rate falls over all of them together."""
    floor: float = 0.0
    """The share that is left at the end of the run, and after it."""

    def share(self, step: int, trained: int, part: float) -> float:
        """The share of the highest rate for a step.

        `step` counts from 1 over the whole run, `trained` are the trainings that are over, and `part` is how
        much of this one was done before the step, in [0, 1).
        """
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        done = min(1.0, (trained + part) / self.trainings)
        match self.shape:
            case "constant":
                return warm
            case "linear":
                fall = 1.0 - done
            case "cosine":
                fall = 0.5 * (1.0 + math.cos(math.pi * done))
        return warm * (self.floor + (1.0 - self.floor) * fall)
