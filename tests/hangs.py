"""A test that hangs is ended and named: its worker, by a thread in C, writes all stacks, and ends."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from typing import Any

import pytest

SECONDS = 300.0
LONGER = 3600.0
"""For marks of tests that may take minutes."""
MINUTES_LONG = {"slow", "cluster", "vllm", "nat", "verifiers", "art", "node"}

_STDERR = pytest.StashKey[int]()
"""The worker's own: pytest puts others in its place while a test runs."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep where errors are printed."""
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Watch a test, with its fixtures."""
    _watch(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Watch on after a failure, where pytest itself calls that off for the sake of its debugger."""
    if isinstance(node, pytest.Item) and not node.config.getoption("usepdb"):
        _watch(node)


def _watch(item: pytest.Item) -> None:
    is_long = any(mark.name in MINUTES_LONG for mark in item.iter_markers())
    seconds, stderr = LONGER if is_long else SECONDS, item.config.stash[_STDERR]
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
