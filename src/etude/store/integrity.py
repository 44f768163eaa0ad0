"""Whether a journal is as it was written: its pages, each row's checksum, and how far it has come.

SQLite itself has no checksums of its pages: a flipped byte in a value is another value to it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from etude.core.errors import StoreError
from etude.store.database import checksum, how_to_mend
from etude.store.mark import read_mark

_SHOWN_KEYS = 3

Row: TypeAlias = tuple[int, Any, Any, Any, Any]
"""Its number, key and value as bytes, when it was stored, and its checksum: if it is whole."""


@dataclass(frozen=True, slots=True)
class Damage:
    """How a journal differs from what was written to it."""

    pages: str | None = None
    """SQLite's words for pages that are damaged."""
    altered: tuple[str, ...] = ()
    """Keys of the entries that are not as they were written."""
    lost: int = 0
    """Entries at the end that are gone, as far as their number is known."""
    mark: str | None = None
    """Why it is not known how far the journal had come."""

    def lines(self, journal: Path) -> list[str]:
        """A clause for each kind of damage to the journal at that path."""
        lines = []
        if self.pages is not None:
            lines.append(f"pages of the database are damaged ({self.pages})")
        if self.altered:
            keys = ", ".join(self.altered[:_SHOWN_KEYS]) + (" …" if len(self.altered) > _SHOWN_KEYS else "")
            lines.append(f"{_counted(len(self.altered))} not as written: {keys}")
        if self.lost:
            lines.append(
                f"{_counted(self.lost)} gone from its end: `{journal.name}-wal`, which had the latest, is "
                "missing or damaged"
            )
        if self.mark is not None:
            lines.append(self.mark)
        return lines


def damage_of(path: Path, connection: sqlite3.Connection) -> Damage | None:
    """How the journal at `path` is damaged; None when it is whole."""
    pages, altered, last = None, [], 0
    try:
        problem = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        pages = None if problem == "ok" else str(problem)
        for row in rows_of(connection):
            last = max(last, row[0])
            if not is_whole(row):
                altered.append(shown_key(row))
    except sqlite3.DatabaseError as error:
        pages = str(error)
    try:
        # Where pages cannot be read it is not known which rows are gone.
        lost, mark = 0 if pages else max(0, read_mark(path) - last), None
    except StoreError as error:
        lost, mark = 0, str(error)
    damage = Damage(pages, tuple(altered), lost, mark)
    return None if damage == Damage() else damage


def require_whole(path: Path, connection: sqlite3.Connection) -> None:
    """Raise StoreError, saying how and what to do, when the journal at `path` is damaged."""
    damage = damage_of(path, connection)
    if damage is not None:
        raise StoreError(f"{path} is damaged: {'; '.join(damage.lines(path))}; {how_to_mend(path)}")


def rows_of(connection: sqlite3.Connection, order: str = "ASC") -> Iterator[Row]:
    """All rows by their numbers, whether they are whole or not. Raises sqlite3.DatabaseError."""
    columns = "rowid, CAST(key AS BLOB), CAST(value AS BLOB), created, checksum"
    yield from connection.execute(f"SELECT {columns} FROM steps ORDER BY rowid {order}")


def is_whole(row: Row) -> bool:
    """Whether a row is as it was written."""
    _, key, value, created, expected = row
    is_row = isinstance(key, bytes) and isinstance(value, bytes) and isinstance(created, float)
    return is_row and checksum(key, value, created) == expected


def shown_key(row: Row) -> str:
    """The key of a row that may be damaged, for people."""
    key = row[1]
    return key.decode(errors="replace") if isinstance(key, bytes) else repr(key)


def _counted(entries: int) -> str:
    return "1 entry is" if entries == 1 else f"{entries} entries are"
