"""Sequences that begin alike, as groups, turns and branches do, for tests of packing."""

from __future__ import annotations

import random

from etude.core.call import Sampling
from etude.core.sample import Sample, Turn

VOCABULARY = 300


def forest(seed: int, count: int, *, temperatures: tuple[float, ...] = (1.0,)) -> list[Sample]:
    """`count` sequences; each goes on from a random place of an earlier one, or starts anew.

    All fields are random, also those of tokens that sequences share.
    """
    choose = random.Random(seed)
    grown: list[list[int]] = []
    for _ in range(count):
        base = choose.choice(grown) if grown and choose.random() < 0.85 else []
        stem = base[: choose.randint(len(base) // 2, len(base))]
        grown.append(stem + [choose.randrange(7, VOCABULARY) for _ in range(choose.randint(3, 12))])
    return [_filled(tuple(ids), choose, temperatures) for ids in grown]


def _filled(ids: tuple[int, ...], choose: random.Random, temperatures: tuple[float, ...]) -> Sample:
    weights = [0.0, *(choose.choice([0.0, 1.0, 1.0]) for _ in ids[1:])]
    weights[choose.randrange(1, len(ids))] = 1.0
    advantage = choose.uniform(-2, 2)
    return Sample(
        ids,
        tuple(map(bool, weights)),
        advantages=tuple(weight * advantage * choose.choice([1.0, 0.5]) for weight in weights),
        # About what a model with a vocabulary of that size says, so that some ratios are clipped.
        logprobs=tuple(weight * choose.uniform(-7, -5) for weight in weights),
        turns=(Turn(0, len(ids), sampling=Sampling(choose.choice(temperatures))),),
    )
