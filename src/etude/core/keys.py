"""Folded keys: every random choice is a pure function of the run's seed and the choice's name.

No global generator is ever read. So a choice does not depend on anything before it, and a resumed run makes
the same choices as an uninterrupted one.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from etude.core.json_text import exact_value

_SEED_BITS = 63
_COMPACT = json.JSONEncoder(separators=(",", ":"))
"""Made once, because `json.dumps` makes one with every call."""


def fold(seed: int, *parts: str | int) -> int:
    """Return a new seed in [0, 2**63) from a seed and the name of a choice, unlike `hash()` the same
    everywhere."""
    digest = hashlib.blake2b(_COMPACT.encode([seed, *parts]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def generator(seed: int, *parts: str | int) -> random.Random:
    """Return a private `random.Random` for one choice, or one stream of choices."""
    return random.Random(fold(seed, *parts))


def shuffled_forever(size: int, seed: int, *parts: str | int) -> Iterator[int]:
    """Yield all numbers below `size` in one random order, then in another, and so on without end."""
    for number in count():
        order = list(range(size))
        generator(seed, *parts, number).shuffle(order)
        yield from order


def content_hash(value: Any) -> str:
    """Return a short stable hash of a JSON-able value: 16 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=exact_value)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
