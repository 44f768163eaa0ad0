"""Counting the retries of a model call, whichever engine makes them, and also when the call is cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class RetryCount:
    """How often a call was tried again so far."""

    retries: int = 0


_COUNT: ContextVar[RetryCount | None] = ContextVar("retry_count", default=None)


@contextmanager
def counting_retries() -> Iterator[RetryCount]:
    """Count the retries that engines note within the block, in tasks that it starts too."""
    count = RetryCount()
    token = _COUNT.set(count)
    try:
        yield count
    finally:
        _COUNT.reset(token)


def note_retry() -> None:
    """To be called by an engine before each attempt after the first."""
    count = _COUNT.get()
    if count is not None:
        count.retries += 1
