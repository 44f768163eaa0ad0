"""The optimiser steps of a training: which rows each is on, shuffled anew for every pass over the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """All steps of a training; the same arguments give the same plan.

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
