"""The place of a process in a team on a cluster, and its line to the head.

A database of the head is nothing that other machines can open. Whoever starts the team puts an object there,
behind a desk, and processes on any node call its methods.
"""

from __future__ import annotations

import os
import pkgutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, StoreError
from etude.store.lock import RunLock, locked_by

MARK = "shared"
"""A file of the head's in the job's folder: a node that has another one, or none, has another folder."""

_LOCK_SECONDS = 60.0
"""In which a process of an earlier team ends, whose launcher was killed."""
_PAUSE_SECONDS = 0.2


class HeadLost(EtudeError):
    """The process on the head that started this one has ended: nobody can be told what it does."""


class Desk:
    """An object on the head, whose methods are called from all nodes."""

    def __init__(self, factory: str, argument: str) -> None:
        """`factory` is the import path of what makes the object of `argument`."""
        self._object = pkgutil.resolve_name(factory)(argument)
        self._stopping = False

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a public method of the object."""
        if name.startswith("_"):
            raise AttributeError(f"{name} is not for others to call")
        return getattr(self._object, name)(*args, **options)

    def stop(self) -> None:
        """Ask the processes to make way, after a checkpoint."""
        self._stopping = True

    def stopping(self) -> bool:
        """Whether they are to make way."""
        return self._stopping


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place in its team."""

    rank: int
    node: str
    """The address of its node."""
    folder: Path
    """The job's, on storage that all nodes share."""
    mark: str
    """The content of the head's file there."""
    _call: Callable[..., Any]
    """Calls a method of the desk by its name. Raises HeadLost."""

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the object on the head. Raises its errors, and HeadLost."""
        return self._call("call", name, *args, **options)

    def stopping(self) -> bool:
        """Whether the team is to make way. Raises HeadLost."""
        return bool(self._call("stopping"))

    def require_shared(self) -> None:
        """Raise StoreError where the job's folder on this node is not that of the head, or takes no locks."""
        path = self.folder / MARK
        try:
            same = path.read_text(encoding="utf-8") == self.mark
        except OSError:
            same = False
        lock = self.folder / "lock"
        problem = None
        if not same:
            problem = "is not the folder that the head has there"
        elif not os.access(self.folder, os.W_OK):
            problem = "is there, but cannot be written to"
        elif locked_by(lock) is None:
            problem = "is shared without file locks, so that two teams could write at once"
        if problem is not None:
            raise StoreError(
                f"{self.folder} on node {self.node} {problem}; keep the data folder (--data-dir) on "
                "storage that all nodes mount at the same path, with file locks, as NFS 4 has them"
            )

    def lock(self, *, leads: bool) -> RunLock | None:
        """Held by a process for as long as it lives, so that of two teams one writes.

        None where a process of another team that `leads` as this one does not end.
        """
        end = time.monotonic() + _LOCK_SECONDS
        path = self.folder / ("leader" if leads else f"member-{self.rank}")
        while time.monotonic() < end:
            with suppress(StoreError):
                return RunLock(path)
            time.sleep(_PAUSE_SECONDS)
        return None


_seat: Seat | None = None


def take_seat(seat: Seat) -> None:
    """Note the place of this process."""
    global _seat
    _seat = seat


def own_seat() -> Seat | None:
    """The place of this process; None where no cluster started it."""
    return _seat
