"""The SQLite file behind a journal: how it is opened, its errors in words, and the thread that writes it.

Writers queue rows and wait. The thread commits the queued rows together and wakes their writers. New rows
queue up during a commit, and during one turn of the event loop. So all steps in flight share the cost of a
commit.
"""

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from etude.core.errors import StoreError, error_words
from etude.store.files import open_private

_LOG = logging.getLogger("etude.journal")

DATABASE = "run.db"
"""The name of a run's journal, in its folder. A journal with another name belongs to no run folder."""

SCHEMA_VERSION = 5
"""Written to every journal. A database with another version is refused."""

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS steps (
    key TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL, created REAL NOT NULL, checksum INTEGER NOT NULL
);
PRAGMA user_version={SCHEMA_VERSION};
COMMIT;
"""
"""One row per journalled step: key, value as JSON, time of storage (Unix seconds), checksum of these."""

_BUSY_SECONDS = 10
_SHOWN_KEYS = 3
_ROWS_PER_STATEMENT = 64

_FULL = "the disk is full, over quota or failing; free some space and resume: nothing stored is lost"
_LOCKED = "another program has locked the database; close it and resume"
_ADVICE = {
    "SQLITE_FULL": _FULL,
    "SQLITE_IOERR": _FULL,
    "SQLITE_BUSY": _LOCKED,
    "SQLITE_LOCKED": _LOCKED,
    "SQLITE_NOTADB": "the file is not a journal; check the path, or begin a new one",
    "SQLITE_READONLY": "the file cannot be written; check the permissions of the file and its folder",
    "SQLITE_CANTOPEN": "the file cannot be opened; check that its folder exists and may be read",
}


def open_database(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open or create the database. Every statement is its own transaction. Raises StoreError."""
    if read_only and not path.is_file():
        raise StoreError(f"{path} does not exist: there is nothing to read here")
    if not read_only and not path.exists():
        # SQLite gives the log and index the same mode. Its own error says best why a file cannot be made.
        with contextlib.suppress(OSError):
            open_private(path, "ab").close()
    query = "?mode=ro" if read_only else ""
    at_rest = not Path(f"{path}-wal").exists()
    if read_only and at_rest and not os.access(path.parent, os.W_OK):
        query += "&immutable=1"  # Else SQLite makes files beside it, also to read.
    try:
        with contextlib.ExitStack() as undone:
            connection = sqlite3.connect(
                path.absolute().as_uri() + query,
                uri=True,
                timeout=_BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            undone.callback(connection.close)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0 and read_only:
                raise StoreError(
                    f"{path} is empty: nothing was stored in it, or it was emptied later. "
                    "`etude resume` starts a run again"
                )
            if version not in (0, SCHEMA_VERSION):
                raise StoreError(
                    f"{path} has schema version {version}, but this version of etude reads version "
                    f"{SCHEMA_VERSION}. Use the one that made it (of a run, environment.json has it), or "
                    "start a new run"
                )
            if not read_only:
                connection.execute("PRAGMA journal_mode=WAL")
                # A commit is on the disk when it returns. Waiting rows share it, so the CPU time per row is
                # no higher than with commits that do not wait (benchmarks/harness.py).
                connection.execute("PRAGMA synchronous=FULL")
                if version == 0:
                    connection.executescript(_SCHEMA)
            undone.pop_all()
            return connection
    except sqlite3.Error as error:
        raise store_error(path, error) from error


def checksum(key: bytes, text: bytes, created: float) -> int:
    """Return the CRC-32 of a row."""
    return zlib.crc32(struct.pack("<d", created), zlib.crc32(text, zlib.crc32(key)))


def insert(connection: sqlite3.Connection, texts: Mapping[str, str]) -> None:
    """Store texts under their keys, in one transaction."""
    now = time.time()
    rows = [(key, text, now, checksum(key.encode(), text.encode(), now)) for key, text in texts.items()]
    # One statement for all rows, and not executemany: SQLite's driver releases the interpreter lock at
    # each step. With a busy main thread, it then waits milliseconds to get the lock back.
    if rows:
        values = ",".join(["(?,?,?,?)"] * len(rows))
        statement = f"INSERT OR REPLACE INTO steps (key, value, created, checksum) VALUES {values}"
        connection.execute(statement, [*chain.from_iterable(rows)])


TO_MEND = (
    "replace it with an intact copy, with the files beside it whose names begin with its name. For a run "
    "with a `storage`, `etude resume ADDRESS` makes one"
)
"""The remedy for a damaged journal."""


def journal_damage(connection: sqlite3.Connection) -> list[str]:
    """Return a clause for each way in which a journal is damaged; SQLite has no checksums for its pages."""
    altered: list[str] = []
    try:
        problem = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        columns = "CAST(key AS BLOB), CAST(value AS BLOB), created, checksum"
        for key, value, created, expected in connection.execute(f"SELECT {columns} FROM steps"):
            is_row = isinstance(key, bytes) and isinstance(value, bytes) and isinstance(created, float)
            if not is_row or checksum(key, value, created) != expected:
                altered.append(key.decode(errors="replace") if isinstance(key, bytes) else repr(key))
    except sqlite3.DatabaseError as error:
        problem = str(error)
    damage = [] if problem == "ok" else [f"pages of the database are damaged ({problem})"]
    if altered:
        counted = "1 entry differs" if len(altered) == 1 else f"{len(altered)} entries differ"
        keys = ", ".join(altered[:_SHOWN_KEYS]) + (" …" if len(altered) > _SHOWN_KEYS else "")
        damage.append(f"{counted} from what was written: {keys}")
    return damage


def store_error(path: Path, error: BaseException) -> StoreError:
    """Return SQLite's error in words: what happened to which file, and what to do."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_CORRUPT"):
        return StoreError(f"{path}: the file is damaged ({error}); {TO_MEND}")
    advice = next((text for prefix, text in _ADVICE.items() if name.startswith(prefix)), None)
    return StoreError(f"{path}: {advice} ({error})" if advice else f"{path}: {error}")


Waiter: TypeAlias = "asyncio.Future[None]"


@dataclass(frozen=True, slots=True)
class Write:
    """Store a text under a key, replacing the old one, or delete the key if there is no text."""

    key: str
    text: str | None


Operation: TypeAlias = Write | None
"""None is a barrier: it writes nothing, and is done when everything queued before it has been tried."""

_Item: TypeAlias = "tuple[Operation, tuple[Waiter, ...]]"


class Writer:
    """Owns the only writing connection of a journal, on a separate thread."""

    def __init__(self, path: Path) -> None:
        """Open or create the database at `path`. Raises StoreError, as `open_database` does."""
        self._path = path
        self._connection = open_database(path)
        self._incoming: deque[_Item] = deque()
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Each item makes the thread look for new operations."""
        self._waking: asyncio.AbstractEventLoop | None = None
        """The event loop that will wake the thread at the end of its turn."""
        self._is_closing = False
        self._unstored: list[_Item] = []
        """Operations without waiters whose commit has failed. They are tried again with the next batch."""
        self._submitted = self._settled = 0
        self._moved = time.monotonic()
        self.committed = 0
        """How many operations that somebody waited for were committed since the database was opened."""
        self._thread = threading.Thread(target=self._run, name=f"etude-journal {path}", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation, *waiters: Waiter) -> None:
        """Queue an operation. Its `waiters` are resolved when it is committed, or get a StoreError.

        On an event loop, the thread is woken at the end of the loop's turn, once for all operations queued in
        it. From another thread, as by a user's trainer that logs metrics there, it is woken at once.
        """
        if not self.waiting:
            self._moved = time.monotonic()
        self._submitted += 1
        self._incoming.append((operation, waiters))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._queue.put(None)
            return
        if self._waking is not loop:
            self._waking = loop
            loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = None
        self._queue.put(None)

    @property
    def waiting(self) -> int:
        """How many operations wait for a commit."""
        return self._submitted - self._settled

    @property
    def waiting_seconds(self) -> float:
        """Seconds since the last batch, or since the first waiting operation was queued. 0 if none waits."""
        return time.monotonic() - self._moved if self.waiting else 0.0

    def close(self) -> None:
        """Write out the queue and end the thread."""
        self._is_closing = True
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while batch := self._take():
            items = [*self._unstored, *batch]
            error: StoreError | None = None
            try:
                self._write([operation for operation, _ in items])
            except sqlite3.Error as problem:
                error = store_error(self._path, problem)
            except Exception as problem:  # noqa: BLE001  without this thread, writers would wait for ever
                _LOG.exception("%s cannot be written", self._path)
                error = StoreError(f"{self._path} cannot be written: {error_words(problem)}")
            if error is None:
                self.committed += sum(operation is not None and bool(waiters) for operation, waiters in batch)
            self._unstored = [item for item in items if not item[1]] if error is not None else []
            self._settled += len(batch)
            self._moved = time.monotonic()
            # Wake all waiters, with one wake-up per event loop.
            by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
            for waiter in chain.from_iterable(waiters for _, waiters in batch):
                by_loop.setdefault(waiter.get_loop(), []).append(waiter)
            for loop, futures in by_loop.items():
                # On a closed loop nobody waits any more.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_settle, futures, error)

    def _take(self) -> list[_Item]:
        """Return the next batch: at least one operation, or none once the writer closes."""
        while not self._incoming and not self._is_closing:
            self._queue.get()
        batch: list[_Item] = []
        while self._incoming and len(batch) < _ROWS_PER_STATEMENT:
            batch.append(self._incoming.popleft())
            operation = batch[-1][0]
            if operation is not None and operation.text is None:
                break  # A deletion is the last of its batch.
        return batch

    def _write(self, batch: list[Operation]) -> None:
        writes = [each for each in batch if each is not None]
        insert(self._connection, {each.key: each.text for each in writes if each.text is not None})
        if writes and writes[-1].text is None:
            self._connection.execute("DELETE FROM steps WHERE key = ?", (writes[-1].key,))


def _settle(waiters: list[Waiter], error: StoreError | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
