"""Python's cyclic garbage collector, set up for a process that has torch in it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 20_000
"""Containers made and not freed until the young ones are looked through; Python's own figure is 700."""


def collect_rarely() -> None:
    """Have cyclic garbage collected more rarely, for the rest of the process; a program calls it first.

    torch and transformers are 300,000 objects that live as long as the process. With Python's own
    threshold up to a fifth of their import is spent on looking through them, and a quarter of a second
    at each full collection afterwards. What is not part of a cycle is freed at once as ever.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


class _Open:
    """How many blocks are open, and the thresholds before the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.before = gc.get_threshold()
        self.lock = threading.Lock()


_open = _Open()


@contextmanager
def collected_rarely() -> Iterator[None]:
    """The same for as long as the block goes on, for runs in the programs of others.

    A GRPO step of 128 short episodes spent 28 % of its CPU time on it. Where a program has set a higher
    threshold, or none, that stays.
    """
    with _open.lock:
        _open.count += 1
        if _open.count == 1:
            _open.before = gc.get_threshold()
            if 0 < _open.before[0] < _NEW_OBJECTS:
                collect_rarely()
    try:
        yield
    finally:
        with _open.lock:
            _open.count -= 1
            if not _open.count:
                gc.set_threshold(*_open.before)
