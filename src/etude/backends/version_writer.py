"""Writes versions to disk in the background: only some of them, but always the last.

A version that was not written is made again from the previous one, on the journalled episodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from etude.backends.state_folders import StateFolders
from etude.core.job import ModelVersion
from etude.learner.optimiser import Snapshot
from etude.models.device import available_memory, shown_bytes

_LOG = logging.getLogger("etude.versions")

_SECONDS = 60.0
"""The default number of seconds between two written versions, if they are large."""
_LARGE = 64_000_000
"""In bytes. Smaller versions, as of nearly all LoRA weights, are written in a tenth of a second."""


@dataclass(frozen=True, slots=True)
class MadeVersion:
    """A version that a job has made, with the data to write."""

    number: int
    facts: Mapping[str, Any]
    """Facts about the job."""
    state: Snapshot


class VersionWriter:
    """A thread that writes a model's versions while the next episodes are collected.

    Call its methods from one thread at a time, with the policy's lock held. The next call raises the errors
    of earlier writes.
    """

    def __init__(self, versions: StateFolders, seconds: float | None) -> None:
        """`seconds` is the time between two written versions. 0 writes each, None means 60 for large ones."""
        self._versions = versions
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="versions")
        self._going_on: list[Future[Any]] = []
        self._unwritten: MadeVersion | None = None
        """The last version. Its tensors are the ones that the next step changes."""
        self._since = time.monotonic()

    def add(self, made: MadeVersion, *, at_once: bool) -> ModelVersion | None:
        """Take a new version. Return it as written, or None if it is not written yet.

        With `at_once`, it is on disk when this returns. Raises StoreError.
        """
        self.settle(waits=False)
        self._unwritten = made
        seconds = self._seconds
        if seconds is None:
            seconds = _SECONDS if made.state.size > _LARGE else 0.0
        if at_once or not seconds:
            return self.flush()
        if time.monotonic() - self._since >= seconds:
            self.write_behind()
        return None

    def write_behind(self) -> None:
        """Write the last version in the background, from a copy, unless it is already written.

        Without enough memory for a copy, it is on disk when this returns. Raises StoreError.
        """
        self.settle(waits=False)
        if (made := self._unwritten) is None:
            return
        free = available_memory()
        if free is not None and 2 * made.state.size > free:
            size = shown_bytes(made.state.size)
            _LOG.warning(
                "version %d is written in place: there is no room for a copy (%s)", made.number, size
            )
            self.flush()
            return
        self._going_on.append(
            self._thread.submit(self._versions.write, made.number, made.facts, made.state.copied())
        )
        self._unwritten, self._since = None, time.monotonic()

    def flush(self) -> ModelVersion | None:
        """Write the last version to disk now. Return it, or None if it was written. Raises StoreError."""
        self.settle()
        if (made := self._unwritten) is None:
            return None
        self._unwritten, self._since = None, time.monotonic()
        return self._versions.write(made.number, made.facts, made.state)

    def drop(self) -> None:
        """Forget the last version if it is not written, because its weights are about to change."""
        self._unwritten = None

    def settle(self, *, waits: bool = True) -> None:
        """Wait for running writes, or with `waits=False` check finished ones only. Raises StoreError."""
        over = [each for each in self._going_on if waits or each.done()]
        self._going_on = [each for each in self._going_on if each not in over]
        for each in over:
            each.result()

    def close(self) -> None:
        """Write the last version, and stop the thread. Raises StoreError."""
        with ExitStack() as steps:
            steps.callback(self._thread.shutdown)
            steps.callback(self.flush)  # Also after an earlier version could not be written.
            self.settle()
