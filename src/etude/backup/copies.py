"""Copies of a run folder at an address: an archive of the journal and small files, and versions beside it.

The journal is copied with SQLite's backup API. A file that changes meanwhile has the copy begun anew, so that
the journal and the files of a copy belong together.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import tarfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from etude.backup.address import Address
from etude.core.errors import RequestError, StoreError
from etude.store.database import DATABASE, open_database, store_error
from etude.store.facts import STORAGE
from etude.store.files import FOLDER_MODE, write_atomically
from etude.store.run_folder import LOCK
from etude.store.status import STATUS
from etude.store.sums import SET_ASIDE

ARCHIVE, HEAD, FILES = "run.tar.gz", "head.json", "files"
FACTS = ".copy.json"
"""In the archive: when the journal was as it is there, and the files that belong to it with their sizes."""

_STAGE = ".storage"
_TRIES, _PAUSE_SECONDS = 20, 0.05
_DATABASES = tuple(f"{DATABASE}{part}" for part in ("", "-wal", "-shm"))
_LEFT_OUT = {*_DATABASES, LOCK, STORAGE, STATUS}

Identity: TypeAlias = tuple[int, int, int]
"""Inode, size and time of the last change: they tell a file from the one that takes its place."""


class TakenOver(StoreError):
    """Another folder goes on with the run."""


class Copies:
    """Makes the copies of one run folder."""

    def __init__(self, run: Path, address: Address) -> None:
        self.address = address
        self._run = run
        known = read_status(run)
        self.is_new = known.get("address") != address.text
        """Whether this folder was never copied to the address."""
        self._head = str(known["head"]) if not self.is_new else os.urandom(16).hex()
        self._there: dict[str, Identity] = {}
        """Files at the address, as they were here when they were written."""
        self._copied: object = None
        """The folder as it was when it was copied last."""

    def require_own(self) -> None:
        """Raise RequestError where the address has another run of this name, TakenOver where this one's
        copies are another folder's by now."""
        head = read_head(self.address)
        if head is None:
            self._there, self._copied = {}, None  # Somebody may have deleted the copies.
            return
        if head["id"] == self._head:
            return
        if self.is_new:
            raise RequestError(
                f"{self.address.text} has a run of this name already; go on with it: etude resume "
                f"{self.address.text}, or choose another name"
            )
        raise TakenOver(f"another folder goes on with this run: process {head['process']} on {head['host']}")

    def copy(self) -> None:
        """Copy what is new, if anything is.

        Raises TakenOver, StoreError or an error of the driver where it cannot be done: the copy before counts
        on then.
        """
        self.require_own()
        for _ in range(_TRIES):
            files = listing(self._run)
            state = files, [_identity(self._run / name) for name in _DATABASES[:2]]
            if state == self._copied:
                return
            with contextlib.suppress(FileNotFoundError):  # Deleted here meanwhile.
                if self._copy(files):
                    self._copied = state
                    return
            time.sleep(_PAUSE_SECONDS)
        raise StoreError(f"the files in {self._run} change all the time, so that they cannot be copied")

    def _copy(self, files: dict[str, Identity]) -> bool:
        """Copy the run; whether its files stayed as they were listed until the journal was copied."""
        if self._copied is None:
            self.note()  # A process that is killed after the next line must know its own head.
            self.is_new = False
            write_head(self.address, self._head)
        for path, identity in files.items():
            if "/" in path and self._there.get(path) != identity:
                self.address.upload(self._run / path, f"{FILES}/{path}")
                self._there[path] = identity
        stage = self._run / _STAGE
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(FOLDER_MODE)
        try:
            archive = _archive(self._run, stage, files)
            if listing(self._run) != files:
                return False
            self.address.upload(archive, ARCHIVE)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        for path in self._there.keys() - files.keys():
            with contextlib.suppress(FileNotFoundError):
                self.address.delete(f"{FILES}/{path}")
            del self._there[path]
        return True

    def note(self, **facts: Any) -> None:
        """Write how the copies stand into the run folder. Raises StoreError."""
        write_status(self._run, {"address": self.address.text, "head": self._head, **facts})


def _archive(run: Path, stage: Path, files: dict[str, Identity]) -> Path:
    """One file of the journal as it is at a commit, and of the files beside it."""
    database, facts, path = stage / DATABASE, stage / FACTS, stage / ARCHIVE
    sizes = {name: size for name, (_, size, _) in files.items()}
    facts.write_text(json.dumps({"taken": time.time(), "files": sizes}), encoding="utf-8")
    try:
        with (
            closing(open_database(run / DATABASE, read_only=True)) as journal,
            closing(sqlite3.connect(database)) as target,
        ):
            journal.backup(target)
    except sqlite3.Error as error:
        raise store_error(run / DATABASE, error) from error
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for each in (database, facts, *(run / name for name in files if "/" not in name)):
            archive.add(each, each.name)
    return path


def listing(folder: Path) -> dict[str, Identity]:
    """The files of a run but for its database, logs and drafts, by their paths in its folder."""
    files = {}
    for root, folders, names in os.walk(folder, followlinks=True):
        inside = Path(root).relative_to(folder)
        drafts = {name for name in folders if name.endswith(".part") or SET_ASIDE in name}
        folders[:] = [name for name in folders if name not in drafts | {_STAGE, "logs"}]
        for name in names:
            is_left_out = name in _LEFT_OUT and inside == Path()
            path = Path(root) / name
            if is_left_out or name.endswith((".part", ".log", ".log.before")) or not path.is_file():
                continue
            if (identity := _identity(path)) is not None:
                files[(inside / name).as_posix()] = identity
    return files


def _identity(path: Path) -> Identity | None:
    with contextlib.suppress(FileNotFoundError):
        facts = path.stat()
        return facts.st_ino, facts.st_size, facts.st_mtime_ns
    return None


def read_head(address: Address) -> dict[str, Any] | None:
    """Which folder the copies at an address are of; None where there are none. Raises StoreError."""
    try:
        return dict(json.loads(address.read(HEAD)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(f"{address.text}/{HEAD} is damaged: {error}; delete it") from error


def write_head(address: Address, head: str) -> None:
    """Make the copies at an address those of one folder."""
    facts = {"id": head, "host": socket.gethostname(), "process": os.getpid()}
    address.write(HEAD, json.dumps(facts).encode())


def read_status(run: Path) -> dict[str, Any]:
    """`storage.json`; empty where there is none."""
    try:
        return dict(json.loads((run / STORAGE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def write_status(run: Path, facts: dict[str, Any]) -> None:
    """Write `storage.json`. Raises StoreError."""
    write_atomically(run / STORAGE, json.dumps(facts, indent=2) + "\n")
