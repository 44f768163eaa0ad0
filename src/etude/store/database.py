"""The SQLite file behind a journal: opening it, its errors in words, and the thread that writes it.

Writers queue rows and wait. The thread takes all rows that are queued, commits them at once, and
wakes every writer. While one commit runs the next rows gather, so that the cost of a commit is
shared by as many steps as there are in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from etude.core.errors import StoreError

SCHEMA_VERSION = 1
"""Written to every run.db. A database of another version is refused, never guessed at."""

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS steps (key TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL, created REAL NOT NULL);
PRAGMA user_version={SCHEMA_VERSION};
COMMIT;
"""
"""One row per journalled step: its key, its value as JSON, and when it was stored (Unix seconds)."""

_BUSY_SECONDS = 10
_ROWS_PER_STATEMENT = 64

_FULL = (
    "the disk is full, over quota or failing; free some space and resume the run, all that was stored is kept"
)
_LOCKED = "another program holds the database locked; close it and resume the run"
_ADVICE = {
    "SQLITE_FULL": _FULL,
    "SQLITE_IOERR": _FULL,
    "SQLITE_BUSY": _LOCKED,
    "SQLITE_LOCKED": _LOCKED,
    "SQLITE_CORRUPT": "the file is damaged; copy the run folder away and start a new run",
    "SQLITE_NOTADB": "the file is not a run database; check the path, or start a new run",
    "SQLITE_READONLY": "the file may not be written; check the permissions of the run folder",
    "SQLITE_CANTOPEN": "the file cannot be opened; check that the folder exists and its permissions",
}


def open_database(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection to the database at `path`, which is made and given its table when it is new.

    Every statement is a transaction of its own. Raises StoreError when the file cannot be opened, is
    damaged, or has another schema version.
    """
    if read_only and not path.is_file():
        raise StoreError(f"{path} does not exist: there is no run to read here")
    address = path.absolute().as_uri() + ("?mode=ro" if read_only else "")
    try:
        connection = sqlite3.connect(
            address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection, path, read_only=read_only)
        except (sqlite3.Error, StoreError):
            connection.close()
            raise
    except sqlite3.Error as error:
        raise store_error(path, error) from error
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, *, read_only: bool) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION) or (version == 0 and read_only):
        raise StoreError(
            f"{path} has schema version {version}, and this version of etude reads version {SCHEMA_VERSION}. "
            f"Use the etude that made the run (see environment.json beside it), or start a new run."
        )
    if read_only:
        return
    connection.execute("PRAGMA journal_mode=WAL")
    # NORMAL in WAL mode: a killed process loses nothing, and a commit does not wait for the disk.
    connection.execute("PRAGMA synchronous=NORMAL")
    if version == 0:
        connection.executescript(_SCHEMA)


def store_error(path: Path, error: BaseException) -> StoreError:
    """The error of SQLite in words: what happened to which file, and what to do."""
    name = getattr(error, "sqlite_errorname", "") or ""
    advice = next((text for prefix, text in _ADVICE.items() if name.startswith(prefix)), None)
    return StoreError(f"{path}: {advice} ({error})" if advice else f"{path}: {error}")


Waiter: TypeAlias = "asyncio.Future[None]"

Bound: TypeAlias = str | bytes
"""Of keys; SQLite sorts bytes after all text, so that `b""` is above every key."""


@dataclass(frozen=True, slots=True)
class Put:
    """Store `text` under `key`, in place of what is there."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the keys in `[first, end)`."""

    first: str
    end: Bound


Operation: TypeAlias = Put | Delete | None
"""None is a barrier: it does nothing, and is over when everything queued before it has been tried."""


class Writer:
    """Owns the only writing connection of a journal, on a thread of its own."""

    def __init__(self, path: Path) -> None:
        """Open or make the database at `path`. Raises StoreError, as `open_database` does."""
        self._path = path
        self._connection = open_database(path)
        self._queue: queue.SimpleQueue[tuple[Operation, Waiter] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"etude-journal {path}", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation, waiter: Waiter) -> None:
        """Queue an operation; `waiter` is resolved when it is committed, or given a StoreError."""
        self._queue.put((operation, waiter))

    def close(self) -> None:
        """Write out what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while batch := self._take():
            _resolve([waiter for _, waiter in batch], self._write([operation for operation, _ in batch]))

    def _take(self) -> list[tuple[Operation, Waiter]]:
        """At least one operation, and the puts that are queued behind it; none at the end."""
        item = self._queue.get()
        batch = []
        while item is not None:
            batch.append(item)
            if not isinstance(item[0], Put) or len(batch) == _ROWS_PER_STATEMENT:
                return batch
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._queue.put(None)  # The end comes after this batch.
        return batch

    def _write(self, batch: list[Operation]) -> StoreError | None:
        now, last = time.time(), batch[-1]
        rows = [
            value
            for operation in batch
            if isinstance(operation, Put)
            for value in (operation.key, operation.text, now)
        ]
        try:
            # One statement for all rows, and not executemany: SQLite's driver gives up the interpreter
            # lock at each step, and a busy main thread makes it wait for milliseconds to get it back.
            if rows:
                self._connection.execute(_put_statement(len(rows) // 3), rows)
            if isinstance(last, Delete):
                self._connection.execute(
                    "DELETE FROM steps WHERE key >= ? AND key < ?", (last.first, last.end)
                )
        except sqlite3.Error as error:
            return store_error(self._path, error)
        return None


@functools.lru_cache(maxsize=_ROWS_PER_STATEMENT)
def _put_statement(rows: int) -> str:
    return "INSERT OR REPLACE INTO steps (key, value, created) VALUES " + ",".join(["(?,?,?)"] * rows)


def _resolve(waiters: list[Waiter], error: StoreError | None) -> None:
    """Wake all waiters, with one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, futures in by_loop.items():
        # A closed loop has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, futures, error)


def _settle(waiters: list[Waiter], error: StoreError | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
