"""Cyclic garbage: looked for more rarely, and still found."""

from __future__ import annotations

import gc
import weakref

import pytest

from etude.core.garbage import collect_rarely


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


class Ring:
    """Part of a cycle."""

    def __init__(self):
        self.itself = self


def test_only_the_young_are_looked_at_more_rarely(thresholds):
    collect_rarely()
    first, *older = gc.get_threshold()
    assert first > 10 * thresholds[0]
    assert older == list(thresholds[1:])


def test_what_is_part_of_a_cycle_is_collected_all_the_same():
    collect_rarely()
    ring = weakref.ref(Ring())
    kept = []
    while ring() is not None and len(kept) < 10 * gc.get_threshold()[0]:
        kept.append([])
    assert ring() is None
