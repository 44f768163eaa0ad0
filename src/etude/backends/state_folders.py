"""The content that identifies a job, folders with the state to resume training from, and their writer.

Versions are written in the background: only some of them, but always the last. One that was not written is
made again from the previous one, on the journalled episodes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.errors import RequestError, StoreError
from etude.core.job import ModelVersion
from etude.models.device import available_memory, shown_bytes
from etude.store.files import SET_ASIDE, damage_in, delete_folder, note_sum, open_draft, require_as_written

if TYPE_CHECKING:
    from etude.learner.optimiser import Snapshot


class JobNameTakenError(RequestError):
    """A job of that name exists and is a different job. Nothing was submitted."""

    def __init__(self, name: str, differences: list[str]) -> None:
        super().__init__(
            f"there is already another job named {name!r}: it has {', '.join(differences)}. "
            "Nothing was submitted; give this job another name, or resume the run with the settings it had"
        )
        self.name, self.differences = name, differences


@dataclass(frozen=True, slots=True)
class JobContent:
    """The parts that define a job. A part is None if it is no longer known.

    A job's name must not be reused with other content.
    """

    data: str | None
    """Hash of the training data."""
    method: str | None
    hyperparameters: str | None
    """Hash of the hyperparameters, including the seed."""
    start: str | None = None
    """The backend's name of the start model. None skips its comparison."""

    def require(self, name: str, asked: JobContent, made: str | None = None) -> None:
        """Raise JobNameTakenError, with the differences, unless `asked` is this job.

        `made` is the model that this job made. A caller that has continued from it may still ask for the job.
        """
        differences = []
        if asked.data != self.data:
            differences.append("other data")
        if asked.method != self.method:
            differences.append(f"another method ({self.method or 'unknown'}, and not {asked.method})")
        elif asked.hyperparameters != self.hyperparameters:
            differences.append("other hyperparameters")
        if asked.start is not None and asked.start not in (self.start, made):
            differences.append(f"another start model ({self.start or 'unknown'}, and not {asked.start})")
        if differences:
            raise JobNameTakenError(name, differences)


_FACTS = "job.json"
_LOG = logging.getLogger("etude.versions")

_SECONDS = 60.0
"""The default number of seconds between two written versions, if they are large."""
_LARGE = 64_000_000
"""In bytes. Smaller versions, as of nearly all LoRA weights, are written in a tenth of a second."""


class StateFolders:
    """Folders `v1`, `v2` or `step-10`, `step-20` of weights, optimiser and facts, complete or absent.

    Each contains the digests of its files, and is read only if they match.
    """

    def __init__(self, root: Path, prefix: str, noun: str) -> None:
        """`noun` is the word for a folder in errors: version or checkpoint."""
        self.root = root
        self._prefix = prefix
        self._noun = noun

    def folder(self, number: int) -> Path:
        """Return the folder's path for a number, whether or not it exists."""
        return self.root / f"{self._prefix}{number}"

    def numbers(self) -> list[int]:
        """Return the existing numbers in ascending order."""
        tails = [path.name[len(self._prefix) :] for path in self.root.glob(f"{self._prefix}*")]
        return sorted(int(tail) for tail in tails if tail.isdecimal())

    def newest(self) -> int:
        """Return the highest existing number, or 0."""
        return max(self.numbers(), default=0)

    def damage(self, number: int) -> list[str]:
        """Return how a folder differs from the written one, one clause per file. Empty if it is undamaged."""
        return damage_in(self.folder(number))

    def write(self, number: int, facts: Mapping[str, Any], state: Snapshot) -> ModelVersion:
        """Save a learner's state and JSON-able facts. Raises StoreError.

        They are on disk when this returns.
        """
        final = self.folder(number)
        try:
            with open_draft(final) as draft:
                draft.mkdir()
                version = ModelVersion(number=number, location=str(final), digest=state.save(draft))
                content = {**facts, "version": version.model_dump(mode="json")}
                (draft / _FACTS).write_text(json.dumps(content, indent=2), encoding="utf-8")
                note_sum(draft / _FACTS)
        except StoreError as error:
            raise StoreError(f"cannot save {self._noun} {number}: {error}") from error
        return version

    def facts(self, number: int) -> dict[str, Any]:
        """Return the facts saved under a number. Raises StoreError if they are damaged."""
        path = self.folder(number) / _FACTS
        require_as_written(path)
        try:
            facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        return facts

    def prune(self, keep: Collection[int]) -> None:
        """Delete every folder whose number is not in `keep`."""
        for number in self.numbers():
            if number not in keep:
                delete_folder(self.folder(number))

    def set_aside(self, number: int) -> Path | None:
        """Rename a folder so that it has no number. Return its new path, or None if it did not exist.

        Raises StoreError.
        """
        folder = self.folder(number)
        if not folder.exists():
            return None
        names = (f"{folder.name}{SET_ASIDE}{copy}" for copy in count(1))
        aside = next(folder.with_name(name) for name in names if not folder.with_name(name).exists())
        try:
            folder.rename(aside)
        except OSError as error:
            raise StoreError(f"{folder} cannot be set aside: {error.strerror}") from error
        return aside


@dataclass(frozen=True, slots=True)
class MadeVersion:
    """A version that a job has made, with the data to write."""

    number: int
    facts: Mapping[str, Any]
    """Facts about the job."""
    state: Snapshot


class VersionWriter:
    """A thread that writes a model's versions while the next episodes are collected.

    Call its methods from one thread at a time, with the policy's lock. It raises errors of earlier writes.
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
            self._thread.submit(self._versions.write, made.number, made.facts, made.state.to_cpu())
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
