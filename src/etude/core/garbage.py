"""Python's cyclic garbage collector, set up for a process that has torch in it."""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NEW_OBJECTS = 20_000
"""Containers made and not freed until the young ones are looked through; Python's own figure is 700."""
_FIRST_OBJECTS = 1_000_000
"""The same for a program that has just begun: torch, transformers and Etude are 660,000 that stay."""


def collect_rarely() -> None:
    """Have cyclic garbage collected more rarely, for the rest of the process; a program calls it first.

    What torch and transformers consist of lives as long as the process. With Python's own threshold up to
    a fifth of their import is spent on looking through them, and a quarter of a second at each full
    collection afterwards: so they are looked through once, when they are there, and never again. What is
    not part of a cycle is freed at once as ever.

    When the program ends, everything is looked through again, which takes 0.5 to 0.9 s of CPU time with
    torch: libraries in C++ write "leaked" to standard error for what is still there after that.
    """
    gc.set_threshold(_FIRST_OBJECTS, *gc.get_threshold()[1:])
    if _settle not in gc.callbacks:
        gc.callbacks.append(_settle)
        atexit.register(_unsettle)


def _settle(phase: str, info: dict[str, Any]) -> None:
    """After the first collection: leave what it has found in use out of all later ones."""
    if phase == "stop":
        gc.callbacks.remove(_settle)
        gc.freeze()
        first, *older = gc.get_threshold()
        if first == _FIRST_OBJECTS:
            gc.set_threshold(_NEW_OBJECTS, *older)


def _unsettle() -> None:
    """Before the last collection: have it look through everything."""
    if _settle in gc.callbacks:
        gc.callbacks.remove(_settle)
    gc.unfreeze()


class _Open:
    """How many blocks are open, and the thresholds before the first of them, where it has changed them."""

    def __init__(self) -> None:
        self.count = 0
        self.before: tuple[int, int, int] | None = None
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
        before = gc.get_threshold()
        if _open.count == 1 and 0 < before[0] < _NEW_OBJECTS:
            _open.before = before
            gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        with _open.lock:
            _open.count -= 1
            if not _open.count and _open.before is not None:
                gc.set_threshold(*_open.before)
                _open.before = None
