"""Combinations of answers: all of them where they are few, otherwise those that payoffs tend to turn on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeAlias

from etude.protocols.said import Utterance

LIMIT = 1024
"""More combinations than this are not all tried: their number doubles with every agent."""

Slot: TypeAlias = Sequence[Utterance]
"""The answers that one agent can give."""


def count_of(slots: Sequence[Slot]) -> int:
    """How many combinations there are."""
    return math.prod(len(slot) for slot in slots)


def combinations_of(slots: Sequence[Slot]) -> Iterator[tuple[Utterance, ...]]:
    """One answer of each slot, in every combination or, beyond `LIMIT`, in a cover of them.

    The cover has those in which all answer alike, in which one of them does otherwise, and in which the
    first do one thing and the others another, so that every count of votes and of failures is there. Its
    size grows with the square of the number of agents at the most.
    """
    chosen = product(*map(range, map(len, slots))) if count_of(slots) <= LIMIT else _cover(slots)
    for indices in chosen:
        yield tuple(slot[index] for slot, index in zip(slots, indices, strict=True))


def _cover(slots: Sequence[Slot]) -> Iterator[tuple[int, ...]]:
    picks = [_picks(slot) for slot in slots]
    kinds = range(max(map(len, picks)))
    alike = [tuple(pick[min(kind, len(pick) - 1)] for pick in picks) for kind in kinds]
    seen: set[tuple[int, ...]] = set()

    def new(indices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if indices not in seen:
            seen.add(indices)
            yield indices

    for base in alike:
        yield from new(base)
        for position, pick in enumerate(picks):
            for index in pick:
                yield from new((*base[:position], index, *base[position + 1 :]))
        for other in alike:
            for position in range(1, len(slots)):
                yield from new((*base[:position], *other[position:]))


def _picks(slot: Slot) -> list[int]:
    """The answers that stand for all of a slot: no decision, the extreme ones, and the least sure ones."""
    decisions = [(answer.decision, index) for index, answer in enumerate(slot)]
    decided = sorted((decision, index) for decision, index in decisions if decision is not None)
    rejects, accepts = [pair for pair in decided if pair[0] < 0], [pair for pair in decided if pair[0] > 0]
    extremes = [*rejects[:1], *rejects[-1:], *accepts[:1], *accepts[-1:]]
    neither = [pair for pair in decided if pair[0] == 0]
    silent = [index for decision, index in decisions if decision is None]
    return list(dict.fromkeys([*silent, *(index for _, index in [*extremes, *neither])]))
