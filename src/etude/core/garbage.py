"""Python's cyclic garbage collector, set up for a process that has torch in it."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 20_000
"""Containers made and not freed until the young ones are looked through; Python's own figure is 700."""


def collect_rarely() -> None:
    """Have cyclic garbage collected more rarely, for the rest of the process; a program calls it first.

    torch and transformers are 300,000 objects that live as long as the process. With Python's own
    threshold up to a fifth of their import is spent on looking through them, and a quarter of a second
    at each full collection afterwards. What is not part of a cycle is freed at once as ever.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
