"""The examples that an epoch plays, and its collections: several as one, and those that are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, count

from etude.core.episode import EpisodeRecord
from etude.core.example import Example
from etude.core.keys import generator
from etude.rewards.collections import numbered
from etude.store.episodes import iter_episodes
from etude.store.journal import Journal


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


def iter_collections(journal: Journal, phase: str) -> Iterator[EpisodeRecord]:
    """The stored episodes of all collections of one kind that an epoch has."""
    for call in count(1):
        episodes = iter_episodes(journal, f"{numbered(phase, call)}/")
        first = next(episodes, None)
        if first is None:
            return
        yield from chain([first], episodes)
