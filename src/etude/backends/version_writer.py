"""Writing versions beside what the run does: not each of them, and the last one in any case.

A version that was not written is made again from the one before it, of the episodes that are in the journal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from etude.core.errors import StoreError
from etude.core.job import ModelVersion
from etude.jobs.folders import StateFolders
from etude.learner.snapshot import Snapshot
from etude.models.memory import available_memory, shown_bytes
from etude.store.learned import write_learned

_LOG = logging.getLogger("etude.versions")

_SECONDS = 60.0
"""Between two versions that are written, where the config says nothing and they are large."""
_LARGE = 64_000_000
"""Bytes. What is smaller, as LoRA weights nearly always are, is written in a tenth of a second."""


@dataclass(frozen=True, slots=True)
class MadeVersion:
    """A version that a job has made, and all that is written of it."""

    number: int
    facts: Mapping[str, Any]
    """Of the job."""
    learned: Callable[[], str]
    """The record of the samples that it was made of."""
    state: Snapshot

    def write(self, versions: StateFolders) -> ModelVersion:
        """Write the record, and then the version. Raises StoreError."""
        self.write_learned(versions)
        return versions.write(self.number, self.facts, self.state)

    def write_learned(self, versions: StateFolders) -> None:
        """Write the record alone. It is for people to look at: training goes on without it."""
        try:
            write_learned(versions.root, self.number, self.learned())
        except StoreError as error:
            _LOG.warning("what version %d was made of is not recorded: %s", self.number, error)


class VersionWriter:
    """Writes the versions of a model in a thread, while the next episodes are collected.

    Its methods are called by one thread at a time, with the policy's lock held. What could not be written is
    an error of the next call.
    """

    def __init__(self, versions: StateFolders, seconds: float | None) -> None:
        """`seconds` are to lie between two versions, 0 for each; None for 60 where they are large."""
        self._versions = versions
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="versions")
        self._going_on: list[Future[Any]] = []
        self._unwritten: MadeVersion | None = None
        """The last version. Its tensors are those that the next step changes."""
        self._since = time.monotonic()

    def add(self, made: MadeVersion, *, at_once: bool) -> ModelVersion | None:
        """Take a version that was just made; where it was written already, what it is.

        `at_once`: it is on the disk when this returns. Raises StoreError.
        """
        self.settle(waits=False)
        self._unwritten = made
        seconds = self._seconds
        if seconds is None:
            seconds = _SECONDS if made.state.size > _LARGE else 0.0
        if at_once or not seconds:
            return self.flush()
        # The record holds the job's samples, which can then be freed.
        self._start(made.write_learned, self._versions)
        if time.monotonic() - self._since >= seconds:
            self.write_behind()
        return None

    def write_behind(self) -> None:
        """Write the last version, if it is not written, from a copy: what it is made of may change meanwhile.

        Where memory has no room for a copy it is on the disk when this returns. Raises StoreError.
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
        copy = replace(made, state=made.state.copied())
        self._start(self._versions.write, copy.number, copy.facts, copy.state)
        self._unwritten, self._since = None, time.monotonic()

    def flush(self) -> ModelVersion | None:
        """Return once the last version is on the disk; the version, if it was not. Raises StoreError."""
        self.settle()
        if (made := self._unwritten) is None:
            return None
        self._unwritten, self._since = None, time.monotonic()
        return made.write(self._versions)

    def drop(self) -> None:
        """The weights are about to change: what is not written of the last version is not there any more."""
        self._unwritten = None

    def settle(self, *, waits: bool = True) -> None:
        """Wait for what is being written, or look only at what has been. Raises StoreError."""
        over = [each for each in self._going_on if waits or each.done()]
        self._going_on = [each for each in self._going_on if each not in over]
        for each in over:
            each.result()

    def close(self) -> None:
        """Write the last version, and end. Raises StoreError."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _start(self, work: Callable[..., object], *arguments: Any) -> None:
        self._going_on.append(self._thread.submit(work, *arguments))
