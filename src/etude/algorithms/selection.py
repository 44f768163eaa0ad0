"""Which examples an epoch collects episodes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from etude.core.example import Example
from etude.core.keys import generator


def examples_for_epoch(
    examples: Sequence[Example], count: int | None, epoch: int, seed: int
) -> list[Example]:
    """`count` examples for an epoch, from a seeded shuffle that cycles through the dataset.

    Each pass uses every example once, in an order of its own, and no epoch has an example twice. All
    examples in their own order when `count` is None or covers them.
    """
    if count is None or count >= len(examples):
        return list(examples)
    chosen: list[int] = []
    waiting: list[int] = []
    passes = 0
    for _ in range(epoch + 1):
        if len(waiting) < count:
            waiting += _next_pass(len(examples), waiting, count - len(waiting), seed, passes)
            passes += 1
        chosen, waiting = waiting[:count], waiting[count:]
    return [examples[index] for index in chosen]


def _next_pass(size: int, left: Sequence[int], needed: int, seed: int, number: int) -> list[int]:
    """A shuffle of all indices whose first `needed` are none of those left over from the pass before."""
    order = _shuffled(size, seed, number)
    skipped = set(left)
    head = [index for index in order if index not in skipped][:needed]
    taken = set(head)
    return head + [index for index in order if index not in taken]


@lru_cache(maxsize=4)
def _shuffled(size: int, seed: int, number: int) -> tuple[int, ...]:
    """Kept, because every epoch starts from the first pass."""
    order = list(range(size))
    generator(seed, "examples", number).shuffle(order)
    return tuple(order)
