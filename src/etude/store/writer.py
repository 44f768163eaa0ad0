"""The journal's writer thread: group commit.

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

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from etude.core.errors import StoreError
from etude.store.database import store_error

Waiter: TypeAlias = "asyncio.Future[None]"

_ROWS_PER_STATEMENT = 64


@dataclass(frozen=True, slots=True)
class Put:
    """Store `text` under `key`, in place of what is there."""

    key: str
    text: str
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the keys in `[first, end)`; `end` None means all from `first` on."""

    first: str
    end: str | None
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Barrier:
    """Resolves when everything queued before it has been tried."""

    waiter: Waiter


Operation: TypeAlias = Put | Delete | Barrier


class Writer:
    """Owns the only writing connection of a journal, on a thread of its own."""

    def __init__(self, engine: sa.Engine, path: Path) -> None:
        self._path = path
        self._connection = engine.connect()
        # NORMAL in WAL mode: a killed process loses nothing, and a commit does not wait for the disk.
        self._connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"etude-journal {path}", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation) -> None:
        """Queue an operation; its waiter is resolved when it is committed, or given a StoreError."""
        self._queue.put(operation)

    def close(self) -> None:
        """Write out what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while batch := self._take():
            _resolve([operation.waiter for operation in batch], self._write(batch))

    def _take(self) -> list[Operation]:
        """At least one operation, and the puts that are queued behind it; none at the end."""
        operation = self._queue.get()
        batch = []
        while operation is not None:
            batch.append(operation)
            if not isinstance(operation, Put) or len(batch) == _ROWS_PER_STATEMENT:
                return batch
            try:
                operation = self._queue.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._queue.put(None)  # The end comes after this batch.
        return batch

    def _write(self, batch: list[Operation]) -> StoreError | None:
        puts = [operation for operation in batch if isinstance(operation, Put)]
        try:
            if puts:
                self._put(puts)
            if isinstance(batch[-1], Delete):
                self._delete(batch[-1])
        except (sqlite3.Error, DBAPIError) as error:
            return store_error(self._path, error)
        return None

    def _put(self, puts: list[Put]) -> None:
        # One statement for all rows, and not executemany: SQLite's driver gives up the interpreter
        # lock at each step, and a busy main thread makes it wait for milliseconds to get it back.
        now = time.time()
        values: list[object] = []
        for put in puts:
            values += (put.key, put.text, now)
        self._connection.exec_driver_sql(_put_statement(len(puts)), tuple(values))

    def _delete(self, operation: Delete) -> None:
        if operation.end is None:
            self._connection.exec_driver_sql("DELETE FROM steps WHERE key >= ?", (operation.first,))
            return
        self._connection.exec_driver_sql(
            "DELETE FROM steps WHERE key >= ? AND key < ?", (operation.first, operation.end)
        )


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
