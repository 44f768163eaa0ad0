"""Cyclic garbage: looked for more rarely, and still found."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from etude.core.garbage import collect_rarely, collected_rarely


@pytest.fixture(autouse=True)
def thresholds():
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    yield before
    gc.set_threshold(*before)
    gc.callbacks[:] = callbacks
    gc.unfreeze()


class Ring:
    """Part of a cycle."""

    def __init__(self):
        self.itself = self


def test_only_the_young_are_looked_at_more_rarely(thresholds):
    collect_rarely()
    first, *older = gc.get_threshold()
    assert first > 10 * thresholds[0]
    assert older == list(thresholds[1:])


def test_what_a_program_begins_with_is_looked_through_once():
    collect_rarely()
    at_first, kept = gc.get_threshold()[0], [[]]
    gc.collect()
    assert 10 * gc.get_threshold()[0] < at_first
    assert not any(value is kept for value in gc.get_objects())
    later = [kept]
    assert any(value is later for value in gc.get_objects())


def test_a_threshold_that_the_program_sets_itself_stays():
    collect_rarely()
    gc.set_threshold(5_000)
    gc.collect()
    assert gc.get_threshold()[0] == 5_000


def test_what_is_part_of_a_cycle_is_collected_all_the_same():
    collect_rarely()
    ring = weakref.ref(Ring())
    kept = []
    most = 2 * gc.get_threshold()[0]
    while ring() is not None and len(kept) < most:
        kept.append([])
    assert ring() is None


def test_a_run_leaves_the_thresholds_as_they_were(thresholds):
    with collected_rarely():
        during = gc.get_threshold()
        with collected_rarely():
            assert gc.get_threshold() == during
        assert gc.get_threshold() == during
    assert during[0] > 10 * thresholds[0]
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("own", [0, 1_000_000])
def test_a_program_that_collects_more_rarely_still_is_left_alone(own):
    gc.set_threshold(own)
    with collected_rarely():
        assert gc.get_threshold()[0] == own
    assert gc.get_threshold()[0] == own


AT_THE_END = """
import gc, os, sys
from etude.cli import main

class Ring:
    write = os.write

    def __del__(self):
        self.write(1, b"found")

ring = Ring()
ring.itself = ring
if sys.argv.pop() == "settled":
    from etude.core.garbage import collect_rarely
    collect_rarely()
    gc.collect()
main()
"""


@pytest.mark.parametrize("begun", ["at once", "settled"])
def test_a_command_ends_with_everything_looked_through(begun):
    """Libraries in C++ say "leaked" of what is still there after that, below the command's last line."""
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END, "--version", begun], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("etude ") and done.stdout.endswith("\nfound")
    assert not done.stderr
