"""The journal: every effect of a run happens once, and is stored under a key.

A run looks under a key before it does something, and does it only if nothing is stored there. So a run that
was killed takes the same way again, and gets back everything that it had paid for. The records of each
trained model are a list in the journal, which add up to its state.
"""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

from etude.core.errors import StoreError
from etude.core.json_text import jsonable
from etude.core.records import KINDS, ModelState, Record, state
from etude.store.database import (
    TO_MEND,
    Operation,
    Waiter,
    Write,
    Writer,
    journal_damage,
    open_database,
    store_error,
)

Json: TypeAlias = Any
"""A value that survives `json.dumps` and `json.loads`."""

_RECORDS = "record/"
"""The prefix of the keys of records, which are numbered from 1."""
TARGETS = "targets"
"""The step with the names of the targets that a run trains."""
_PAGE = 256


class Steps(Protocol):
    """The part of `Journal` that an episode uses, also in processes that have no journal."""

    path: Path
    """The path of the journal, for messages."""

    def get(self, key: str, default: Json = None) -> Json:
        """As `Journal.get`."""

    async def put(self, key: str, value: Json) -> None:
        """As `Journal.put`."""


class Journal:
    """A durable map from step keys to JSON values, safe against kill -9 at any instant.

    When `step` and `put` return, the value is committed. Only one process may write a journal, which the run
    folder's lock ensures. Any number may read it.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        """Open or create the journal. One opened for writing is verified first. Raises StoreError."""
        self.path = Path(path)
        self._reader = open_database(self.path, read_only=read_only)
        if not read_only and (damage := journal_damage(self._reader)):
            self._reader.close()
            raise StoreError(f"{self.path} is damaged: {'; '.join(damage)}; {TO_MEND}")
        self._reader_lock = threading.Lock()
        self.writer = None if read_only else Writer(self.path)
        """The thread that writes, with its counts. None if the journal is only read."""
        self._keys: set[str] | None = None
        """All keys of a journal that is written. Others need no look into the file."""
        self._numbers: Iterator[int] | None = None
        """The numbers of further records."""
        self._closed = False
        if not read_only:
            self._keys = {key for (key,) in self.select("SELECT key FROM steps")}

    async def step(self, key: str, fn: Callable[[], Awaitable[Json]]) -> Json:
        """Return the stored value of the step `key`, or else run `fn` and return its committed result.

        Only one task may ask for a key at a time. When `fn` raises, nothing is stored. The value is returned
        as JSON keeps it (a tuple as a list): a resumed run sees no difference.

        Raises the errors of `fn`, TypeError for a value that is not JSON, StoreError when the journal fails.
        """
        text = self._lookup(key)
        if text is None:
            text = _dumps(key, await fn())
            await self._commit(self._put(key, text))
        return json.loads(text)

    def get(self, key: str, default: Json = None) -> Json:
        """Return the value stored under `key`, or `default`. Raises StoreError when it cannot be read."""
        text = self._lookup(key)
        return default if text is None else json.loads(text)

    async def put(self, key: str, value: Json) -> None:
        """Store `value` under `key`, and wait until it is committed. Raises TypeError, StoreError.

        It is committed even if the caller is cancelled meanwhile.
        """
        await self._commit(self._put(key, _dumps(key, value)))

    def put_soon(self, key: str, value: Json) -> None:
        """Store a value under `key` without waiting. It is committed before every later entry.

        It does not count as `committed`. After a failed commit, it is tried again with the next entries,
        whose writers get the error. Raises StoreError when the journal is closed.
        """
        self._require_writer().submit(self._put(key, _dumps(key, value)))

    async def append(self, record: Json) -> None:
        """Add a record to the end of the journal's list, and wait until it is committed."""
        await self.put(self._next_record(), record)

    def append_soon(self, record: Json) -> None:
        """Add a record as `put_soon` stores a value."""
        self.put_soon(self._next_record(), record)

    def records(self) -> Iterator[Json]:
        """Yield all records, in order."""
        return (value for _, value in self.scan(_RECORDS))

    def _next_record(self) -> str:
        if self._numbers is None:
            statement = "SELECT max(key) FROM steps WHERE key >= ? AND key < ?"
            [(last,)] = self.select(statement, _range(_RECORDS))
            self._numbers = count(1 if last is None else int(last.removeprefix(_RECORDS)) + 1)
        return f"{_RECORDS}{next(self._numbers):09d}"  # `next` is safe between threads.

    def scan(
        self, prefix: str = "", *, start: str | None = None, where: str = "1"
    ) -> Iterator[tuple[str, Json]]:
        """Yield keys that start with `prefix` and their values, in order, from the key `start` on.

        `where` is a condition on the rows in SQL.
        """
        first, end = _range(prefix)
        first = start or first
        while True:
            rows = self.select(
                f"SELECT key, value FROM steps WHERE key >= ? AND key < ? AND {where} "
                f"ORDER BY key LIMIT {_PAGE}",
                (first, end),
            )
            for key, text in rows:
                yield key, json.loads(text)
            if len(rows) < _PAGE:
                return
            first = rows[-1][0] + "\0"  # The least key after this one.

    def times(self, prefix: str) -> dict[str, float]:
        """Return when each key that starts with `prefix` was stored, in Unix seconds."""
        rows = self.select("SELECT key, created FROM steps WHERE key >= ? AND key < ?", _range(prefix))
        return dict(rows)

    async def forget(self, key: str) -> None:
        """Delete one key, so that its step runs again. Returns when that is committed."""
        await self._commit(Write(key, None))

    async def flush(self) -> None:
        """Wait until all writes that were started are committed or have failed."""
        await self._commit(None)

    def close(self) -> None:
        """Write out the queue and close the file. Calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self.writer is not None:
            self.writer.close()
        with self._reader_lock:
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _put(self, key: str, text: str) -> Write:
        if not key.isascii():
            try:
                key.encode()
            except UnicodeEncodeError as error:
                raise StoreError(f"{self.path}: step key {key!r} is not valid Unicode text") from error
        if self._keys is not None:
            self._keys.add(key)
        return Write(key, text)

    async def _commit(self, operation: Operation) -> None:
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._require_writer().submit(operation, waiter)
        await waiter

    def _require_writer(self) -> Writer:
        if self._closed:
            raise StoreError(f"{self.path}: the journal is closed")
        if self.writer is None:
            raise StoreError(f"{self.path}: this journal was opened for reading only")
        return self.writer

    def _lookup(self, key: str) -> str | None:
        # A lookup releases the interpreter's lock. Next to a thread that samples, getting it back takes ten
        # times as long as the query.
        if self._keys is not None and key not in self._keys and not self._closed:
            return None
        rows = self.select("SELECT value FROM steps WHERE key=?", (key,))
        return rows[0][0] if rows else None

    def select(self, statement: str, bounds: tuple[str, ...] = ()) -> list[Any]:
        """Return the rows of a SELECT over `steps (key, value, created)`. Raises StoreError."""
        if self._closed:
            raise StoreError(f"{self.path}: the journal is closed")
        try:
            with self._reader_lock:
                return self._reader.execute(statement, bounds).fetchall()
        except sqlite3.Error as error:
            raise store_error(self.path, error) from error


class ModelLog:
    """Adds to the records of one trained model, and keeps the state that they add up to."""

    def __init__(self, journal: Journal, target: str | None = None) -> None:
        """`target` names the model, if the journal has records of several."""
        self._journal = journal
        self.target = target
        self.state = read_states(journal).get(target) or state([], journal.path.parent.name)

    async def add(self, record: Record) -> None:
        """Add a record, wait until it is committed, and change the state."""
        # Shielded: if this task is cancelled now, the state still follows the journal.
        await asyncio.shield(asyncio.ensure_future(self._add(record)))

    async def _add(self, record: Record) -> None:
        await self._journal.append(self._row(record))
        self.state.apply(record)

    def add_soon(self, record: Record) -> None:
        """Add a record without waiting. It is committed before every later one."""
        self._journal.append_soon(self._row(record))
        self.state.apply(record)

    def _row(self, record: Record) -> dict[str, Any]:
        value = record.model_dump(mode="json", fallback=jsonable)
        return {"kind": type(record).__name__, "target": self.target, "value": value}


def read_states(journal: Journal) -> dict[str | None, ModelState]:
    """Return the state of each target, in the order of the config. With one model, the key is None."""
    records: dict[str | None, list[Record]] = {target: [] for target in journal.get(TARGETS, ())}
    for row in journal.records():
        record = KINDS[row["kind"]].model_validate(row["value"])
        records.setdefault(row["target"], []).append(record)
    run_id = journal.path.parent.name
    return {target: state(own, run_id) for target, own in (records or {None: []}).items()}


def _dumps(key: str, value: Json) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the value of step {key!r} cannot be stored as JSON: {error}") from error


def _range(prefix: str) -> tuple[str, str]:
    """Return the bounds `[first, end)` of the keys that start with `prefix`, which no U+10FFFF follows."""
    return prefix, f"{prefix}\U0010ffff"
