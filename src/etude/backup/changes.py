"""The journal as segments: which keys have changed since a point, and a journal made of such changes anew.

A trigger of the database itself notes each change in the transaction that makes it, so that no crash comes
between the two. A segment has the keys that changed in a span of those notes, with their values at one
commit; all segments of a backup in their order make the journal as it was at the last of these commits.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.backup.manifest import Segment
from etude.core.errors import StoreError
from etude.store.database import PUT_ROW, open_database, row_of, store_error
from etude.store.files import open_private

_TABLES = (
    "CREATE TABLE changes (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL)",
    "CREATE TABLE heads (id TEXT NOT NULL PRIMARY KEY)",
)
_TRIGGERS = (
    "CREATE TRIGGER note_put AFTER INSERT ON steps BEGIN INSERT INTO changes (key) VALUES (new.key); END",
    "CREATE TRIGGER note_delete AFTER DELETE ON steps BEGIN INSERT INTO changes (key) VALUES (old.key); END",
)
_POSITION = "SELECT COALESCE((SELECT seq FROM sqlite_sequence WHERE name='changes'), 0)"
_CHANGED = """
SELECT latest, changed.key, value, created
FROM (SELECT key, MAX(number) AS latest FROM changes WHERE number > ? GROUP BY key) AS changed
LEFT JOIN steps ON steps.key = changed.key ORDER BY latest
"""

_SEGMENT_BYTES = 16 << 20
"""Characters of values after which a segment ends."""
_MERGED_BYTES = 64 << 20
"""Segments that are larger together are not merged any more."""
_TOGETHER = 16
"""So many segments of one level become one of the next: a change is written once per level."""


@contextmanager
def _transaction(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction of its own on the database. Raises StoreError."""
    with closing(open_database(path)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise store_error(path, error) from error


def note_changes(path: Path, head: str) -> bool:
    """Have all changes of a journal noted from now on, and remember that `head` works on it.

    Whatever a journal has when this begins counts as changed. True when it did begin. Raises StoreError.
    """
    with _transaction(path) as connection:
        begins = not _is_noted(connection)
        if begins:
            for statement in (*_TABLES, *_TRIGGERS):
                connection.execute(statement)
            connection.execute("INSERT INTO changes (key) SELECT key FROM steps ORDER BY rowid")
        connection.execute("INSERT INTO heads (id) VALUES (?)", (head,))
    return begins


def _is_noted(connection: sqlite3.Connection) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE name='changes'"
    return connection.execute(query).fetchone() is not None


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment that was written to a file here."""

    after: int
    until: int
    level: int
    path: Path


class Snapshot:
    """The journal as it is at one commit."""

    def __init__(self, connection: sqlite3.Connection, position: int) -> None:
        self.position = position
        """How many changes it has seen."""
        self.taken = time.time()
        self._connection = connection

    def heads(self) -> set[str]:
        """All heads that have worked on this journal, in this folder."""
        return {head for (head,) in self._connection.execute("SELECT id FROM heads")}

    def write(self, after: int, level: int, folder: Path) -> list[SegmentFile]:
        """Write what has changed after a position into files, one or several; none where nothing has."""
        segments: list[SegmentFile] = []
        rows: list[tuple[Any, ...]] = []
        start, characters = after, 0
        for number, *row in self._connection.execute(_CHANGED, (after,)):
            rows.append(tuple(row))
            characters += len(row[1] or "")
            if characters >= _SEGMENT_BYTES:
                segments.append(SegmentFile(start, number, level, _written(folder / f"{number}.gz", rows)))
                rows, start, characters = [], number, 0
        if rows:
            path = _written(folder / f"{self.position}.gz", rows)
            segments.append(SegmentFile(start, self.position, level, path))
        return segments


@contextmanager
def snapshot(path: Path) -> Iterator[Snapshot]:
    """The journal as it is now, whatever is written to it meanwhile. Raises StoreError."""
    with closing(open_database(path, read_only=True)) as connection:
        try:
            connection.execute("BEGIN")
            (position,) = connection.execute(_POSITION).fetchone()
            yield Snapshot(connection, position)
        except sqlite3.Error as error:
            raise store_error(path, error) from error


def position_of(path: Path) -> int:
    """How many changes a journal has seen. Raises StoreError."""
    with snapshot(path) as now:
        return now.position


def _written(path: Path, rows: Iterable[Sequence[Any]]) -> Path:
    """A file with a line of JSON for each row: key, value and time of a put, the key alone of a delete."""
    with (
        open_private(path, "wb") as packed,
        gzip.open(packed, "wt", compresslevel=1, encoding="utf-8", newline="\n") as file,
    ):
        for key, value, created in rows:
            file.write(json.dumps([key] if value is None else [key, value, created]) + "\n")
    return path


def kept_segments(segments: Sequence[Segment]) -> tuple[Sequence[Segment], int]:
    """The segments of a backup that the next one keeps, and the level of the segment that goes on there."""
    kept, level = list(segments), 0
    while True:
        last = kept[-_TOGETHER:]
        same = len(last) == _TOGETHER and all(segment.level == level for segment in last)
        if not same or sum(segment.object.size for segment in last) > _MERGED_BYTES:
            return kept, level
        del kept[-_TOGETHER:]
        level += 1


def rebuild(path: Path, segments: Iterable[tuple[Segment, Path]], until: int, note: tuple[str, Any]) -> int:
    """Make the database at `path` from all segments of a backup; how many entries it has.

    `until` is the position that they end at. `note` is one more entry, with its key. Raises StoreError when
    there are no segments for some changes.
    """
    with _transaction(path) as connection:
        for statement in _TABLES:
            connection.execute(statement)
        position = 0
        for segment, file in segments:
            if segment.after != position:
                raise StoreError(f"the backup has no changes from {position + 1} to {segment.after}")
            _apply(connection, segment, file)
            position = segment.until
        if position != until:
            raise StoreError(f"the backup has no changes from {position + 1} to {until}")
        for statement in _TRIGGERS:
            connection.execute(statement)
        connection.execute("DELETE FROM sqlite_sequence")
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('changes', ?)", (position,))
        (count,) = connection.execute("SELECT COUNT(*) FROM steps").fetchone()
        connection.execute(PUT_ROW, row_of(note[0], json.dumps(note[1]), time.time()))
    return int(count)


def _apply(connection: sqlite3.Connection, segment: Segment, file: Path) -> None:
    """Make the changes of a segment, and note them: segments that are merged later have them too."""
    with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, segment.after + 1):
            row = json.loads(line)
            connection.execute("INSERT INTO changes (number, key) VALUES (?,?)", (number, row[0]))
            if len(row) == 1:
                connection.execute("DELETE FROM steps WHERE key=?", row)
            else:
                connection.execute(PUT_ROW, row_of(*row))
