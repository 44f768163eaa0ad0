"""Games: seven numbers, and the one to be found."""

from __future__ import annotations

import random

NUMBERS, LARGEST = 7, 99
TRAIN, HELD_OUT = 384, 128


def rows(random: random.Random) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Different games: to train on, and held out."""
    games = [
        {"low": low, "high": low + NUMBERS - 1, "secret": low + place}
        for low in range(1, LARGEST - NUMBERS + 2)
        for place in range(NUMBERS)
    ]
    random.shuffle(games)
    return games[:TRAIN], games[TRAIN : TRAIN + HELD_OUT]
